"""Makes a tiny Llama with random weights: no download, 2 MB, equal files for equal seeds.

Its answers are random words that depend on the whole prompt, so that any wrong token is visible. Greedy answers are
printable text and never end before `max_tokens`.

    python examples/cpu/tiny_model.py DIRECTORY
"""
# transformers is only partly annotated.
# mypy: disallow-untyped-calls=False

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
END = "<|end|>"
RECIPE_FILE = "recipe.sha256"
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CORPUS = (
    "A head takes every request, counts the work each replica holds, and hands the next one to the least busy.",
    "When a replica goes quiet, the others carry on with its unfinished answers and nobody waits twice.",
    "system: Answer briefly. user: How many engines are running? assistant: Two engines are running here.",
    "The quick question got a short reply; the long question got a longer one, token after token.",
    'tool: {"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "unit": "celsius"}}',
    "Once upon a time there were 0 1 2 3 4 5 6 7 8 9 small models on one machine, and all of them were fast.",
    "Nothing was lost, nothing came twice, and every stream ended exactly once with a reason for finishing.",
)


def make_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Make the model in `directory`, unless it exists with the same recipe and seed.

    Safe to call from several processes at once, and after an interrupted call: the directory is renamed when complete.
    Needs torch, transformers and tokenizers.

    Returns:
        `directory`.

    Raises:
        FileExistsError: `directory` holds something that this function did not make.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes() + str(seed).encode()).hexdigest()
    if _recipe_in(directory) == recipe:
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made = Path(scratch, "made")
        _save_tokenizer_and_weights(made, seed)
        (made / RECIPE_FILE).write_text(recipe)
        _put_in_place(made, directory, recipe)
    return directory


def _recipe_in(directory: Path) -> str | None:
    try:
        return (directory / RECIPE_FILE).read_text()
    except FileNotFoundError:
        return None


def _put_in_place(made: Path, directory: Path, recipe: str) -> None:
    try:
        made.rename(directory)
    except OSError as error:
        found = _recipe_in(directory)
        if found == recipe:  # another process was faster
            return
        if found is None:
            raise FileExistsError(f"{directory} exists and holds no tiny model; name another directory") from error
        directory.rename(made.with_name("outdated"))
        made.rename(directory)


def _save_tokenizer_and_weights(directory: Path, seed: int) -> None:
    # Imported here because that takes seconds, and is not needed if the model exists.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    tokenizer = _train_tokenizer()
    logging.disable_progress_bar()
    # With the default standard deviation of 0.02 answers would depend almost only on the last token.
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # A logit of 0 is never the highest of hundreds of random ones.
        model.lm_head.weight[_unprintable_tokens(tokenizer)] = 0.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _train_tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}; lengthen it")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=CHAT_TEMPLATE
    )


def _unprintable_tokens(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    texts = [str(tokenizer.decode([token])) for token in range(VOCAB_SIZE)]
    return [token for token, text in enumerate(texts) if text == END or not (text.isascii() and text.isprintable())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.directory, seed=arguments.seed))
