"""sentence-transformers: sentences of many lengths become vectors, a batch of 16 at a time."""

import hashlib
import random
import tempfile
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

WORDS = [f"word{number}" for number in range(500)]


def save_encoder(folder: Path) -> None:
    """A random BERT with its tokenizer, as a model is downloaded."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=505,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)


torch.manual_seed(0)
draw = random.Random(0)
sentences = [" ".join(draw.choices(WORDS, k=draw.randint(4, 60))) for _ in range(48)]
with tempfile.TemporaryDirectory() as name:
    save_encoder(Path(name))
    encoder = Transformer(name, max_seq_length=64)
    pooling = Pooling(encoder.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[encoder, pooling, Normalize()], device="cpu")
    vectors = model.encode(sentences, batch_size=16)
print(hashlib.sha256(vectors.tobytes()).hexdigest())
