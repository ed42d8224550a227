"""Outlines of the files behind some names of models.toml; laboratory.published states the sources."""

from __future__ import annotations

from dataclasses import replace

from laboratory.published import PublishedFile, Shape, Vocabulary

_LLAMA_WORDS = Vocabulary(
    "llama-bpe", 128256, 280147,
    {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128006: "<|start_header_id|>",
     128007: "<|end_header_id|>", 128008: "<|eom_id|>", 128009: "<|eot_id|>"},
    eos=128009, bos=128000, add_bos=True,
)  # fmt: skip
_QWEN_WORDS = Vocabulary(
    "qwen2", 151936, 151387,
    {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"},
    eos=151645, padding=151669,
)  # fmt: skip
_OSS_WORDS = Vocabulary(
    "gpt-4o", 201088, 446189,
    {199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>",
     200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>", 200012: "<|call|>"},
    eos=200002, bos=199998,
)  # fmt: skip
_GEMMA_WORDS = Vocabulary(
    "default", 262144, 0,
    {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 105: "<start_of_turn>", 106: "<end_of_turn>"},
    eos=106, bos=2, add_bos=True,
)  # fmt: skip
# Models with vision have a soft image token, and padding up to a multiple of 64.
_VISION_WORDS = replace(
    _GEMMA_WORDS, size=262208, special={**_GEMMA_WORDS.special, 262144: "<image_soft_token>"}, padding=262145
)

_LLAMA_70B = Shape(
    "llama", blocks=80, width=8192, ffn=28672, heads=64, kv_heads=8, head=128, context=131072, rope_base=500000.0,
    epsilon=1e-5, vocabulary=_LLAMA_WORDS, rope_freqs=True,
)  # fmt: skip
_LLAMA_8B = replace(_LLAMA_70B, blocks=32, width=4096, ffn=14336, heads=32)
_LLAMA_1B = replace(_LLAMA_8B, blocks=16, width=2048, ffn=8192, head=64, tied=True)
_QWEN_32B = Shape(
    "qwen3", blocks=64, width=5120, ffn=25600, heads=64, kv_heads=8, head=128, context=40960, rope_base=1e6,
    epsilon=1e-6, vocabulary=_QWEN_WORDS,
)  # fmt: skip
_QWEN_0_6B = replace(_QWEN_32B, blocks=28, width=1024, ffn=3072, heads=16, tied=True)
_GEMMA_27B = Shape(
    "gemma3", blocks=62, width=5376, ffn=21504, heads=32, kv_heads=16, head=128, context=131072, rope_base=1e6,
    epsilon=1e-6, vocabulary=_VISION_WORDS, tied=True,
    keys={"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
)  # fmt: skip
_GEMMA_1B = replace(
    _GEMMA_27B, blocks=26, width=1152, ffn=6912, heads=4, kv_heads=1, head=256, context=32768,
    vocabulary=_GEMMA_WORDS, keys={"attention.sliding_window": 512},
)  # fmt: skip
_OSS_20B = Shape(
    "gpt-oss", blocks=24, width=2880, ffn=2880, heads=64, kv_heads=8, head=64, context=131072, rope_base=150000.0,
    epsilon=1e-5, vocabulary=_OSS_WORDS, experts=(32, 4),
    keys={"attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
          "rope.scaling.original_context_length": 4096},
)  # fmt: skip

FILES: dict[str, tuple[PublishedFile, ...]] = {
    "llama-8b-q4": (
        PublishedFile(
            "lmstudio-community/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", 4.92,
            "Q4_K_M", _LLAMA_8B,
        ),
    ),
    "qwen3-32b-q4": (
        PublishedFile("unsloth/Qwen3-32B-GGUF", "Qwen3-32B-Q4_K_M.gguf", 19.76, "Q4_K_M", _QWEN_32B),
        PublishedFile("unsloth/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q4_0.gguf", 0.382, "Q4_0", _QWEN_0_6B),
    ),
    "gemma-3-27b-q4": (
        PublishedFile(
            "bartowski/google_gemma-3-27b-it-GGUF", "google_gemma-3-27b-it-Q4_K_M.gguf", 16.55, "Q4_K_M", _GEMMA_27B
        ),
        PublishedFile(
            "bartowski/google_gemma-3-1b-it-GGUF", "google_gemma-3-1b-it-Q4_K_M.gguf", 0.81, "Q4_K_M", _GEMMA_1B
        ),
    ),
    "gpt-oss-20b": (PublishedFile("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf", 12.1, "MXFP4", _OSS_20B),),
    "llama-70b-q4": (
        PublishedFile(
            "bartowski/Llama-3.3-70B-Instruct-GGUF", "Llama-3.3-70B-Instruct-Q4_K_M.gguf", 42.52, "Q4_K_M", _LLAMA_70B
        ),
        PublishedFile(
            "bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf", 0.81, "Q4_K_M", _LLAMA_1B
        ),
    ),
}  # fmt: skip
