"""Which tenants have a metric label of their own, and the tokens served since they have it."""

from collections.abc import Container

from vllm_omni_plugin.admission.tenant_accounts import TenantAccount

MAX_LABELS = 50
"""Tenants with a label at a time. Clients may send any number of names."""


class TenantLabels:
    """Counters for a bounded number of tenants by name, and one for all others together. No counter ever decreases.

    A tenant of the admission file keeps its label for good. Any other tenant loses it to a tenant of the file, or to a
    tenant that was served more than twice as many tokens. So the number of labels over time grows only with the
    logarithm of the served tokens, whatever names clients send. A tenant that gets a label again starts a new count.

    Attributes:
        other_tokens: served to tenants without a label.
    """

    def __init__(self) -> None:
        self.other_tokens = 0
        # By name, with the tokens that the tenant had been served before it got the label.
        self._labelled: dict[str, tuple[TenantAccount, int]] = {}

    def add(self, account: TenantAccount, configured: Container[str]) -> None:
        """Give a tenant a label, if it may have one. Call this for each request and each tenant of the file."""
        counted = 0
        if account.name in self._labelled:
            known, before = self._labelled[account.name]
            # A different account, if that one was dropped in the meantime.
            counted = known.served_tokens - before
        elif len(self._labelled) >= MAX_LABELS:
            least = min(
                (each for each, _ in self._labelled.values() if each.name not in configured),
                key=lambda each: each.served_tokens,
                default=None,
            )
            if least is None:
                return
            if account.name not in configured and account.served_tokens <= 2 * least.served_tokens:
                return
            del self._labelled[least.name]
        self._labelled[account.name] = account, account.served_tokens - counted

    def count_served(self, account: TenantAccount, tokens: int) -> None:
        """Count tokens that `account.served_tokens` includes already."""
        if account.name not in self._labelled:
            self.other_tokens += tokens

    def served(self) -> list[tuple[TenantAccount, int]]:
        """The tenants with a label, and the tokens served since they have it. For any thread."""
        return [(account, account.served_tokens - before) for account, before in list(self._labelled.values())]
