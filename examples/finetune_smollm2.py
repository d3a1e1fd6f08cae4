"""Fine-tunes SmolLM2-135M, or any model of the Llama family, in less memory than its weights and AdamW would take.

    python examples/finetune_smollm2.py
    python examples/finetune_smollm2.py --weights bfloat16 --release-gradients --text my/notes
    python examples/finetune_smollm2.py --model Llama-3.2-1B --optimizer flash_adamw --weights bfloat16

The weights come with a Python package of 93 MB, the text is Python's standard library. `--model` takes a folder with
config.json, tokenizer.json and safetensors, as Hugging Face's `transformers` loads and saves them; the trained model is
saved as such a folder. Under bfloat16 weights, `split_master_weights` is put around any optimizer that needs it.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from llama.model import Llama
from llama.pretrained import Pretrained
from llama.safetensors_weights import stored_in_bfloat16
from llama.smollm2 import EXPECTED, PROMPT, check_loaded, smollm2_folder
from lm.checkpoints import RunCheckpoints
from lm.command import option, prepare, progress
from lm.data import Corpus, load_corpus, tokens_of
from lm.optimizers import NAMES, completing_weights, optimizer_named
from lm.recipe import Recipe
from lm.report import plot, table, write_json
from lm.settings import settings_of
from lm.steps import MakeOptimizer, TrainState, check
from lm.steps import optimizer as scheduled_optimizer
from lm.training import train
from spectra_optax import MemoryTable, master_weights, memory_table

CACHE = Path("runs/models")
CHOSEN = ["spectra_adamw"]
LINES = 1000  # that the tokenizer sees at a time
SAMPLE = 32  # tokens of a completion
EVALUATIONS, WINDOWS = 2, 32  # of the validation loss, beside that before the first step
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
console = Console(soft_wrap=True, markup=False, highlight=False)


@app.command()
def main(
    model: Annotated[Path | None, option("Folder of a Llama; by default SmolLM2-135M.", "Model")] = None,
    prompt: Annotated[str, option("Completed before and after.", "Model")] = "def read_lines(path):",
    compute: Annotated[str, option("float32, or bfloat16, faster on GPUs and TPUs.", "Model")] = Llama.compute,
    text: Annotated[Path | None, option("A file or a folder; by default Python's standard library.", "Text")] = None,
    context: Annotated[int, option("Tokens of a sequence.", "Text", min=1)] = 128,
    optimizer: Annotated[list[str], option(f"Repeatable; {NAMES}.", "Optimizer")] = CHOSEN,
    learning_rate: Annotated[float, option("Peak, after the warm-up.", "Optimizer", min=0)] = 1e-4,
    b1: Annotated[float, option("Decay of the momentum.", "Optimizer")] = Recipe.b1,
    b2: Annotated[float, option("Decay of the second moment.", "Optimizer")] = Recipe.b2,
    weight_decay: Annotated[float, option("Of matrices.", "Optimizer")] = Recipe.weight_decay,
    clip: Annotated[float, option("Global norm that gradients are clipped to.", "Optimizer")] = Recipe.clip,
    weights: Annotated[str, option("float32, or bfloat16 with their other bits as state.", "Optimizer")] = "float32",
    release_gradients: Annotated[bool, option("Update each layer on the way back.", "Optimizer")] = False,
    steps: Annotated[int, option("Training steps.", "Run")] = 40,
    batch: Annotated[int, option("Sequences per step.", "Run")] = 4,
    seed: Annotated[int, option("Of the order of the text.", "Run", min=0)] = 0,
    out: Annotated[Path, option("Folder for results, models, checkpoints.", "Run")] = Path("runs/finetune_smollm2"),
    resume: Annotated[bool, option("Go on from the checkpoints in --out, else replace them.", "Run")] = False,
    checkpoint_every: Annotated[int, option("Steps between checkpoints.", "Run")] = 50,
) -> None:
    """Fine-tunes SmolLM2-135M, or another Llama, with one optimizer or several that start from the same weights."""
    try:
        factories = {name: factory_named(name, weights) for name in optimizer}
        start = Pretrained.open(model or smollm2_folder(CACHE), context=context, compute=compute)
        corpus = load_corpus(text, tokens_of(start.tokenizer, lines=LINES), context)
        recipe = Recipe(
            start.network, steps, batch, b1, b2, weight_decay, clip, weights,
            evaluations=EVALUATIONS, validation_windows=WINDOWS, release=release_gradients,
        )  # fmt: skip
        tables = {name: table_of(recipe, make_optimizer) for name, make_optimizer in factories.items()}
        source = str(start.folder.resolve())
        settings = settings_of(recipe, corpus, learning_rate=learning_rate, seed=seed, source=source)
        folders = {name: RunCheckpoints(out / name, settings, every=checkpoint_every, last=steps) for name in factories}
        prepare(folders, resume)
        introduce(start, corpus, weights, prompt, is_smollm2=model is None)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    results = {}
    for name, make_optimizer in factories.items():
        console.print(f"\n{name}\n{tables[name]}")
        run = functools.partial(train, recipe, corpus, make_optimizer, learning_rate=learning_rate, seed=seed)
        with progress(name, recipe, done=folders[name].step or 0) as on_step:
            load = functools.partial(start.load, weights)
            result = run(start=load, checkpoints=folders[name], on_step=on_step)
        console.print(f"after: {prompt}{start.complete(result.state.params, prompt, SAMPLE)}")
        start.save(weights_of(result.state, start), out / "models" / name)
        results[name] = dataclasses.replace(result, state=None)  # makes room for the next
    plot(results, out / "curves.png")
    write_json(results, settings, out / "results.json")
    console.print(table(results))
    console.print(f"models: {out}/models, curves: {out}/curves.png, numbers: {out}/results.json")


def factory_named(name: str, weights: str) -> MakeOptimizer:
    """An optimizer for parameters in float32 or bfloat16."""
    make_optimizer = optimizer_named(name)
    return make_optimizer if weights == "float32" else completing_weights(make_optimizer)


def table_of(recipe: Recipe, make_optimizer: MakeOptimizer) -> MemoryTable:
    """What the optimizer's state will take, once it is sure that it can be made."""
    shapes = recipe.model.sizes.shapes(recipe.weights)
    check(recipe, make_optimizer, shapes)
    return memory_table(scheduled_optimizer(recipe, make_optimizer, 0.0), shapes)


def introduce(start: Pretrained, corpus: Corpus, weights: str, prompt: str, *, is_smollm2: bool) -> None:
    """Says what is trained on what, and what it says before; SmolLM2 must know the capital of Italy."""
    sizes = start.network.sizes
    console.print(f"model: {start.folder}, {sizes.parameters / 1e6:.1f} M parameters, {sizes.layers} layers")
    console.print(f"text: {len(corpus.training):,} tokens, and {len(corpus.validation):,} held out for validation")
    params = start.load(weights)
    if is_smollm2:
        check_loaded(start, params)
        console.print(f"check: {PROMPT}{EXPECTED}")
    console.print(f"before: {prompt}{start.complete(params, prompt, SAMPLE)}")


def weights_of(state: TrainState, start: Pretrained) -> Any:
    """What is worth saving: float32 weights, unless they would be rounded to the bfloat16 that is there already."""
    is_whole = jax.tree.leaves(state.params)[0].dtype == "float32" or stored_in_bfloat16(start.folder)
    return state.params if is_whole else master_weights(state.params, state.optimizer)


if __name__ == "__main__":
    app()
