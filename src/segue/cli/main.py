"""The command line: ``segue serve``, ``router``, ``cluster``, ``chat``, ``trainer``, ``models`` and more."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Literal

import typer
from rich.console import Console

import segue
from segue.cli.asking import MaxTokens, Temperature, TopP, given, opened
from segue.cli.bench import bench_app
from segue.cli.chat import Conversation, converse
from segue.cli.compile import compile_kernels
from segue.cli.doctor import doctor
from segue.cli.failover_demo import failover_demo
from segue.cli.flags import join_lists, setting, with_options
from segue.cli.generate import generate
from segue.cli.gms import gms_app
from segue.cli.models import CacheDir, cache_directory, models_app
from segue.cli.remote import ClientKey, ServerUrl, control_app
from segue.cli.reporting import errors_in_red
from segue.cli.serving import SETTINGS, router, run_cluster, serve
from segue.cli.top import top
from segue.cluster.config import ClusterConfig
from segue.config import SERVER_GROUPS, Device, EngineConfig, LogLevel
from segue.listener import bind, listen
from segue.logs import LogFormat, configure
from segue.router.config import RouterConfig

app = typer.Typer(
    name="segue",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)
app.command("serve")(serve)
app.command("router")(router)
app.add_typer(bench_app, name="bench")
app.add_typer(gms_app, name="gms")
app.add_typer(models_app, name="models")
app.add_typer(control_app)
app.command("generate")(generate)
app.command("top")(top)
app.command("doctor")(doctor)
app.command("compile")(compile_kernels)
app.command("failover-demo")(failover_demo)


def main() -> None:
    """Run the command line. A SegueError is printed as one red line, and the exit code is 1."""
    with errors_in_red():
        app(args=join_lists(sys.argv[1:], EngineConfig, RouterConfig))


def _print_version(requested: bool) -> None:
    """Print the version and end, if ``--version`` was given; Typer calls this before any command."""
    if requested:
        typer.echo(f"segue {segue.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Segue: an LLM inference engine for the places where serving must not break."""


TrainingDType = Literal["float32", "bfloat16"]


@app.command()
@with_options(ClusterConfig)
def cluster(config: ClusterConfig) -> None:
    """Start several engines and their router on this machine, and keep them running.

    Clients use the router. Every option can also be set by the environment variable that its help names.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # as for `serve`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_cluster(config)


@app.command()
@with_options(EngineConfig, without=SERVER_GROUPS)
def chat(
    config: EngineConfig,
    url: ServerUrl = None,
    api_key: ClientKey = None,
    system: Annotated[str | None, setting("system", "A system message.", group="Chat")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
) -> None:
    """Talk to a model in the terminal; /help lists the commands."""
    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    conversation = Conversation(system, sampling)
    with opened(config, url, api_key) as model:
        converse(model, conversation)


@app.command()
def trainer(
    model: Annotated[
        str | None,
        setting(
            "model",
            "Directory, GGUF file or hub id; default: the bundled SmolLM2-135M-Instruct.",
            group="Model",
        ),
    ] = None,
    host: Annotated[str, setting("host", "Address to listen on.", group="Server")] = "127.0.0.1",
    port: Annotated[
        int, setting("port", "Port to listen on; 0 picks a free one.", group="Server", min=0, max=65535)
    ] = 8990,
    device: Annotated[Device, setting("device", "Where the model is trained.", group="Model")] = "auto",
    dtype: Annotated[
        TrainingDType, setting("dtype", "Type of the weights, also when sent.", group="Model")
    ] = "float32",
    learning_rate: Annotated[
        float, setting("learning_rate", "Learning rate of AdamW.", group="Model", min=0)
    ] = 1e-5,
    cache_dir: CacheDir = None,
    log_level: Annotated[LogLevel, setting("log_level", "How much is logged.", group="Server")] = "info",
    log_format: Annotated[LogFormat, setting("log_format", "How lines look.", group="Server")] = "text",
    allowed_hosts: Annotated[
        str | None,
        setting(
            "allowed_hosts",
            "Names that clients may use for this server, separated by commas.",
            group="Server",
        ),
    ] = None,
    cors_origin: Annotated[
        str | None,
        setting(
            "cors_origin",
            "Origins of web pages that may use this server, separated by commas.",
            group="Server",
        ),
    ] = None,
) -> None:
    """Train a model, and send its weights to running servers.

    POST /add_inference_endpoint adds a server, /sync_inference_weights sends weights, /train_step trains.
    """
    from segue.http_guard import HttpGuard
    from segue.trainer.model import TrainedModel
    from segue.trainer.server import Trainer, run

    configure(log_level, log_format)
    guard = HttpGuard(host, allowed_hosts=allowed_hosts, cors_origin=cors_origin)
    listener = bind(host, port)
    listen(listener)
    trained = TrainedModel(
        model, device=device, dtype=dtype, learning_rate=learning_rate, cache_dir=cache_directory(cache_dir)
    )
    console = Console(highlight=False)
    url = f"http://{host}:{listener.getsockname()[1]}"
    console.print(f"[bold green]Ready[/bold green] at [bold]{url}[/bold]: {trained.name}", soft_wrap=True)
    run(Trainer(trained), listener, guard)
