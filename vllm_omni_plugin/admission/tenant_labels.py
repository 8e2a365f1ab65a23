"""Which tenants metrics tell apart, and what each of them was served while they did."""

from collections.abc import Container

from vllm_omni_plugin.admission.tenant_accounts import TenantAccount

MAX_NAMED = 50
"""Tenants that metrics tell apart at a time. Clients may name any number."""


class TenantLabels:
    """Counts that never fall, of few tenants by name and of all others as one.

    A tenant of the admission file has its name for good, any other one until it is needed for one of the file, or for
    one that was served more than twice as much. So there are few names over time, too: their number grows with the
    logarithm of what is served, whatever clients call themselves. A tenant that gets its name again counts anew.

    Attributes:
        other_tokens: that others than the named ones were served.
    """

    def __init__(self) -> None:
        self.other_tokens = 0
        # By name, with what it had been served when it got it.
        self._named: dict[str, tuple[TenantAccount, int]] = {}

    def come(self, account: TenantAccount, configured: Container[str]) -> None:
        """A request of a tenant has come, or the tenant is in the file: it may get its name.

        Args:
            account: the tenant's.
            configured: tenants of the file.
        """
        counted = 0
        if account.name in self._named:
            known, before = self._named[account.name]
            # Another account if that one was forgotten meanwhile.
            counted = known.served_tokens - before
        elif len(self._named) >= MAX_NAMED:
            least = min(
                (each for each, _ in self._named.values() if each.name not in configured),
                key=lambda each: each.served_tokens,
                default=None,
            )
            if least is None:
                return
            if account.name not in configured and account.served_tokens <= 2 * least.served_tokens:
                return
            del self._named[least.name]
        self._named[account.name] = account, account.served_tokens - counted

    def answered(self, account: TenantAccount, tokens: int) -> None:
        """A tenant was served so many tokens more, which its account counts already."""
        if account.name not in self._named:
            self.other_tokens += tokens

    def served(self) -> list[tuple[TenantAccount, int]]:
        """The named ones, and what each was served since it has its name. From any thread."""
        return [(account, account.served_tokens - before) for account, before in list(self._named.values())]
