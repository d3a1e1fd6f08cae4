"""Memory of a training step with gradient release and without, from XLA's compiler; nothing is run but by `--time`.

    python examples/release_memory.py --model gpt
    pip install 'jax[tpu]'
    python examples/release_memory.py --model llama --target v5e:4x4
    pip install 'jax[cuda13]'
    python examples/release_memory.py --model gpt --target h100

The peak is what the compiled program holds: arguments, results that are not written in their place, temporaries. Layers
are stacked and scanned, or (`--unrolled`) written out, where XLA can by itself update a layer before it goes on.
"""

import os
import time
from typing import Annotated

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from lm.released import Decoder, model_of, ordinary_step
from spectra_optax import (
    Companded,
    ExactClip,
    LaggedClip,
    Spectrum,
    flash_adamw,
    gradient_release,
    spectra_adamw,
    split_master_weights,
)
from spectra_optax.backend import compiling_for
from spectra_optax.planning.targets import target_named

MODELS = {
    "tiny": Decoder(vocabulary=512, layers=4, width=128, heads=4, kv_heads=4, hidden=512),
    "gpt": Decoder(vocabulary=50304, layers=24, width=576, heads=9, kv_heads=9, hidden=1536),
    "llama": Decoder(vocabulary=128256, layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, is_tied=False),
}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "flash_adamw": flash_adamw(1e-3),
    "spectra_adamw": split_master_weights(spectra_adamw(1e-3, momentum=Spectrum(values=Companded()))),
}
NAMES = list(OPTIMIZERS)
STEPS = ["ordinary", "released"]
CLIPS = {"none": None, "exact": ExactClip(1.0), "lagged": LaggedClip(1.0)}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "gpt",
    target: Annotated[str, typer.Option(help="cpu, or a topology such as v5e:4x4 or h100.")] = "cpu",
    only: Annotated[list[str], typer.Option(help="Optimizers; repeatable.")] = NAMES,
    dtype: Annotated[str, typer.Option(help="Of weights and gradients.")] = "bfloat16",
    sequences: Annotated[int, typer.Option(help="Per step.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    kinds: Annotated[list[str], typer.Option("--step", help="ordinary, released; repeatable.")] = STEPS,
    unrolled: Annotated[bool, typer.Option(help="Layers that are written out.")] = False,
    clip: Annotated[str, typer.Option(help=f"One of {', '.join(CLIPS)}.")] = "none",
    timed: Annotated[bool, typer.Option("--time", help="Run the steps, on the CPU, and print their times.")] = False,
) -> None:
    """Prints a table; per parameter, in bytes, and the difference."""
    decoder, place = MODELS[model], placed(target)
    params = shapes_of(decoder, dtype, place, unrolled)
    count = sum(x.size for x in jax.tree.leaves(params))
    chips = 1 if place is None else place.devices.size
    batch = jax.ShapeDtypeStruct((sequences, length + 1), "int32", sharding=sharded(place, (0, None)))
    table = Table("optimizer", "step", "weights and state", "temporaries, MB", "peak, bytes per parameter", "ms")
    for name in only:
        for kind in kinds:
            with compiling_for(platform_of(target)):
                step, state = step_of(kind, decoder, OPTIMIZERS[name], params, place, unrolled, CLIPS[clip])
                compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
            m, share = compiled.memory_analysis(), chips / count
            peak = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
            ms = f"{milliseconds(compiled, params, state, batch):.0f}" if timed else ""
            held = f"{m.argument_size_in_bytes * share:.2f}"
            table.add_row(name, kind, held, f"{m.temp_size_in_bytes / 1e6:.1f}", f"{peak * share:.2f}", ms)
    Console(width=120).print(f"{model}: {count / 1e6:.1f} M parameters in {dtype} on {target}", table)


def step_of(kind, decoder: Decoder, tx, params, place, unrolled, clip):
    """The step, and the shapes of its state."""
    paths = [f"layers/{i}" for i in range(decoder.layers)] if unrolled else "layers"
    functions = model_of(decoder, sharded(place, (0, None, None)))
    inner = tx if clip is None or kind == "released" else optax.chain(optax.clip_by_global_norm(clip.max_norm), tx)
    state = like(jax.eval_shape(inner.init, params), place)
    if kind == "ordinary":
        return ordinary_step(inner, **functions), state
    state = clip.init(state) if isinstance(clip, LaggedClip) else state
    return gradient_release(inner, params, **functions, layers=paths, clip=clip), jax.eval_shape(lambda s: s, state)


def shapes_of(decoder: Decoder, dtype: str, place: Mesh | None, unrolled: bool):
    shapes = decoder.shapes(dtype, stacked=not unrolled)
    return like(shapes, place)


def like(shapes, place: Mesh | None):
    """Shapes laid out over all chips, along the last axis that they divide."""

    def laid(x):
        divided = [i for i, n in enumerate(x.shape) if place is not None and n % place.devices.size == 0]
        axes = [None] * len(x.shape)
        if divided:
            axes[divided[-1]] = 0
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded(place, axes))

    return jax.tree.map(laid, shapes)


def sharded(place: Mesh | None, axes) -> NamedSharding | None:
    """A layout in which the axes marked by 0 are divided over all chips."""
    if place is None:
        return None
    return NamedSharding(place, PartitionSpec(*("chips" if axis == 0 else None for axis in axes)))


def placed(target: str) -> Mesh | None:
    """Chips that are only known to the compiler."""
    if target == "cpu":
        return None
    chips = target_named(target)
    return Mesh(chips.mesh((chips.devices, 1)).devices[:, 0], ("chips",))


def platform_of(target: str) -> str:
    """What JAX calls it."""
    return "cpu" if target == "cpu" else target_named(target).platform.replace("cuda", "gpu")


def milliseconds(compiled, params, state, batch) -> float:
    """The least of ten runs."""
    filled = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, state, batch))
    params, state, batch = jax.tree.map(lambda x: x + 0, filled)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        params, state, *_ = jax.block_until_ready(compiled(params, state, batch))
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


if __name__ == "__main__":
    typer.run(main)
