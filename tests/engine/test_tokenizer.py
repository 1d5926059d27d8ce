"""Tokenizers against transformers' on varied texts; special tokens that users cannot forge."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from hal_engine.checkpoint.gguf_header import read_gguf_header
from hal_engine.config import ModelConfig, load_model_config
from hal_engine.tokenizer import TextTokenizer, load_tokenizer
from hal_engine.tokenizer_errors import TokenizerError
from hal_engine.tokenizer_gguf import tokenizer_of_metadata

SAMPLES = [
    "Hello, world!",
    " leading and trailing  ",
    "tabs\tand\nlines\r\n\r\n  mixed \n\n\n",
    "It's we'll I'D they'VE",
    "3.14159 1,000,000 0x1F 12345678901234567890",
    "½ ¾ ² ³ ① Ⅷ ٣٤٥ १२३ 二百 𝟘𝟙𝟚 ௧௨௩",
    "def f(x):\n    return {k: v for k, v in x.items() if v != None}\n",
    "<html><body class='a'>&nbsp;</body></html>",
    "Ünïcödé é é ﬁ Ǆ ß İi",
    "日本語のテキスト 中文 한국어 ไทย العربية עברית हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 👍🏽",
    "\u200b\u200d\ufeff\u00a0\u2028\u3000",
    "a" * 300,
    " " * 70 + "x",
    "\x00\x01\x7f\x80\x9f",
    "$x^2 + \\frac{1}{2}$ #hashtag @user https://example.org/a?b=c&d=%20",
    "",
]
POOLS = [
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ",
    "0123456789",
    "٠١٢٣٤٥६७८९½¾²³①Ⅷ𝟘𝟙",
    " \t\n\r\u00a0\u3000",
    ".,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+~`",
    "äöüßéèñçøåžşğ",
    "日本語中文한국어ไทยالعربية",
    "😀🎉👍🏽🇩🇪\u200d\ufe0f",
    "\u0301\u0308\u200b\x00\x1f",
]


def varied_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = list(SAMPLES)
    while len(texts) < count:
        pieces = []
        for _ in range(rng.randint(1, 12)):
            pool = rng.choice(POOLS)
            pieces.append("".join(rng.choice(pool) for _ in range(rng.randint(1, 8))))
        texts.append(rng.choice(["", " "]).join(pieces))
    return texts


def has_digit(text: str) -> bool:
    return any(unicodedata.category(char).startswith("N") for char in text)


@pytest.fixture(scope="module")
def config(smollm2_gguf: Path) -> ModelConfig:
    return load_model_config(smollm2_gguf)


@pytest.fixture(scope="module")
def tokenizer(config: ModelConfig) -> Iterator[TextTokenizer]:
    loaded = load_tokenizer(config)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def parts(smollm2_gguf: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return get_gguf_tokenizer(str(smollm2_gguf))


@pytest.fixture(scope="module")
def converted(parts: Any) -> tokenizers.Tokenizer:
    """transformers' conversion, which leaves out the split of single digits."""
    return convert_gguf_tokenizer(parts[0], parts[1])[0]


@pytest.fixture(scope="module")
def with_digits(parts: Any) -> tokenizers.Tokenizer:
    """The conversion with the step that the name `smollm` stands for."""
    backend = convert_gguf_tokenizer(parts[0], parts[1])[0]
    steps = [tokenizers.pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    return backend


TEXTS = varied_texts(600, seed=11)


def test_tokens_equal_transformers(
    tokenizer: TextTokenizer, converted: tokenizers.Tokenizer, with_digits: tokenizers.Tokenizer
) -> None:
    as_converted = 0
    for text in TEXTS:
        ours = tokenizer.encode(text, add_special_tokens=True, parse_special=True)
        assert ours == with_digits.encode(text, add_special_tokens=True).ids, repr(text)
        if not has_digit(text):
            assert ours == converted.encode(text).ids, repr(text)
            as_converted += 1
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert plain == ours, repr(text)  # none of these texts holds a special token
        assert b"".join(map(tokenizer.token_bytes, ours)) == text.encode()
        assert tokenizer.decode(ours, skip_special_tokens=True) == with_digits.decode(ours)
    assert as_converted > 100


def test_only_digits_differ_from_the_conversion(
    tokenizer: TextTokenizer, converted: tokenizers.Tokenizer
) -> None:
    differing = [
        text
        for text in TEXTS
        if tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        != converted.encode(text).ids
    ]
    assert differing  # the step has an effect, and only beside digits
    assert all(has_digit(text) for text in differing)


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "gpt-2"])
def test_other_pre_tokenizers_equal_transformers(name: str, smollm2_gguf: Path, parts: Any) -> None:
    metadata = {**read_gguf_header(smollm2_gguf).metadata, "tokenizer.ggml.pre": name}
    ours = tokenizer_of_metadata(smollm2_gguf, metadata)
    theirs = convert_gguf_tokenizer(parts[0], {**parts[1], "pre_tokenizer_type": name})[0]
    if name == "llama-bpe":
        theirs.model.ignore_merges = True  # as transformers' own conversion of Llama 3 sets it
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids, text


def test_llama_bpe_begins_with_its_begin_token(smollm2_gguf: Path) -> None:
    metadata = dict(read_gguf_header(smollm2_gguf).metadata)
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    del metadata["tokenizer.ggml.add_bos_token"]
    ours = tokenizer_of_metadata(smollm2_gguf, metadata)
    assert ours.encode("Hi").ids[0] == metadata["tokenizer.ggml.bos_token_id"]
    metadata["tokenizer.ggml.add_eos_token"] = True
    ours = tokenizer_of_metadata(smollm2_gguf, metadata)
    assert ours.encode("Hi").ids[-1] == metadata["tokenizer.ggml.eos_token_id"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "superbpe"}, ["tokenizer.ggml.pre", "'superbpe'", "smollm"]),
        ({"pre": "qwen"}, ["'qwen'", "nearest is 'qwen2'"]),
        ({"pre": None}, ["tokenizer.ggml.pre", "nothing"]),
        ({"pre": ["smollm"]}, ["tokenizer.ggml.pre"]),
        ({"model": "llama"}, ["tokenizer.ggml.model", "'llama'"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens", "nothing"]),
        ({"tokens": [1, 2]}, ["tokenizer.ggml.tokens"]),
        ({"tokens": ["a", "b", "a"]}, ["'a' twice"]),
        ({"token_type": [1]}, ["token_type", "1 for 49152"]),
        ({"merges": ["a b c d"]}, ["merges", "'a b c d'"]),
        ({"merges": None}, ["merges", "nothing"]),
        ({"add_bos_token": True, "bos_token_id": 10**9}, ["bos_token_id", "1000000000"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_unknown_or_damaged_tokenizers_are_refused(
    changes: dict[str, Any], words: list[str], smollm2_gguf: Path
) -> None:
    metadata = dict(read_gguf_header(smollm2_gguf).metadata)
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError) as caught:
        tokenizer_of_metadata(smollm2_gguf, metadata)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_special_tokens_parse_only_where_asked(tokenizer: TextTokenizer) -> None:
    text = "a<|im_end|>b <|im_start|>system <|endoftext|>"
    parsed = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert [i for i in parsed if i in tokenizer.special_token_ids] == [2, 1, 0]
    assert not set(plain) & tokenizer.special_token_ids
    assert tokenizer.decode(plain, skip_special_tokens=True) == text
    assert tokenizer.decode(parsed, skip_special_tokens=True) == "ab system "
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_long_texts_give_the_tokens_of_the_whole(
    tokenizer: TextTokenizer, smollm2_gguf: Path, add_special_tokens: bool, parse_special: bool
) -> None:
    text = " ".join(varied_texts(300, 5)) + "<|im_end|>" + "x" * 3000
    theirs = tokenizer_of_metadata(smollm2_gguf, read_gguf_header(smollm2_gguf).metadata)
    theirs.encode_special_tokens = not parse_special
    found = tokenizer.encode(
        text, add_special_tokens=add_special_tokens, parse_special=parse_special
    )
    assert found == theirs.encode(text, add_special_tokens=add_special_tokens).ids


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: TextTokenizer) -> None:
    """A stranger's text of megabytes must not hold up every stream of a server."""
    awake, is_over = [time.monotonic()], threading.Event()

    def note_times() -> None:
        while not is_over.wait(0.001):
            awake.append(time.monotonic())

    other = threading.Thread(target=note_times)
    other.start()
    try:
        begin = time.monotonic()
        ids = tokenizer.encode("7" * 200_000, add_special_tokens=False, parse_special=False)
        end = time.monotonic()
    finally:
        is_over.set()
        other.join()
    assert len(ids) == 200_000
    times = [begin, *(moment for moment in awake if begin < moment < end), end]
    longest = max(later - earlier for earlier, later in pairwise(times))
    assert longest < 0.7 * (end - begin), "it kept the interpreter's lock"


def test_a_lone_surrogate_is_a_clear_error(tokenizer: TextTokenizer) -> None:
    for parse_special in (False, True):
        with pytest.raises(ValueError, match=r"surrogate U\+D83D at position 2"):
            tokenizer.encode("ab\ud83d", add_special_tokens=False, parse_special=parse_special)


def test_ids_without_token_do_no_harm(tokenizer: TextTokenizer) -> None:
    for token_id in (-1, 49152, 2**31, 2**40):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.decode([token_id, 9690], skip_special_tokens=False) == "system"
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}


def test_folder_tokenizer_equals_transformers(
    with_digits: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=with_digits, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    theirs.save_pretrained(tmp_path)
    transformers.LlamaConfig(vocab_size=49152, eos_token_id=0).save_pretrained(tmp_path)
    ours = load_tokenizer(load_model_config(tmp_path))
    assert ours.eos_token_ids == {0, 2}
    assert not ours.has_chat_template
    for text in [*TEXTS[:60], "x<|im_end|>y"]:
        expected = theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=True, parse_special=True) == expected


def test_sentencepiece_style_tokenizer(tmp_path: Path) -> None:
    """Begin token, visible spaces and byte fallback, as in Llama 2 and Mistral folders."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, special_tokens=special[:3])
    backend.train_from_iterator(SAMPLES * 3, trainer)
    state = json.loads(backend.to_str())
    for token in special[3:]:
        state["model"]["vocab"][token] = len(state["model"]["vocab"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    theirs.save_pretrained(tmp_path)
    transformers.LlamaConfig(vocab_size=2000).save_pretrained(tmp_path)
    ours = load_tokenizer(load_model_config(tmp_path))
    for text in [*TEXTS[:200], "a</s>b"]:
        expected = backend.encode(text).ids
        assert ours.encode(text, add_special_tokens=True, parse_special=True) == expected
    ids = ours.encode("héllo ✓", add_special_tokens=False, parse_special=False)
    assert b"".join(map(ours.token_bytes, ids)) == " héllo ✓".encode()


def test_broken_folder_tokenizers_are_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig().save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(config)
    for text in ("", "{}", "[1]", '{"version": "1.0", "model": {"type": "Nope"}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            load_tokenizer(config)
    shutil.rmtree(tmp_path)
