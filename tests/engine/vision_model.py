"""A tiny model that sees: a random vision encoder in front of the tiny model.

Idefics3, because its image processor has a variant for PIL that vLLM supports; most others need torchvision, of which
there is no build that fits the CPU build of torch.
"""

# transformers is only partly annotated.
# mypy: disallow-untyped-calls=False

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

IMAGE_SIZE = 56
PATCH_SIZE = 14
SCALE_FACTOR = 2
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE // SCALE_FACTOR) ** 2
IMAGE_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}assistant: "
)


VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "initializer_range": 0.2,
}


def make_vision_model(directory: Path, tiny_model: Path) -> Path:
    """Make the model from the text model in `tiny_model`.

    Returns:
        `directory`.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    _save_weights(directory, tokenizer, AutoModelForCausalLM.from_pretrained(tiny_model))
    edge = {"longest_edge": IMAGE_SIZE}
    image_processor = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(
        image_processor, tokenizer, image_seq_len=TOKENS_PER_IMAGE, chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(directory)
    return directory


def _save_weights(directory: Path, tokenizer: Any, text: Any) -> None:
    words = text.config.vocab_size
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = Idefics3Config(
        text_config=text.config,
        vision_config=VISION,
        scale_factor=SCALE_FACTOR,
        image_token_id=tokenizer.vocab["<image>"],
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Idefics3ForConditionalGeneration(config)
        model.model.text_model = text.model
        model.lm_head = text.lm_head
        # Answers are words: a logit of 0 never wins.
        model.lm_head.weight[words:] = 0.0
        # As strong as the words' own embeddings, or the image would not change the answer.
        model.model.connector.modality_projection.proj.weight.normal_(std=0.2)
    model.save_pretrained(directory)
