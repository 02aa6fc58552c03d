"""The command line, ``fedasync``: a study, a plan, their pictures, and what the package says of itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A simulation-first testbed for federated and asynchronous training.",
)

DEFAULT_OUT = Path("results")
INTERRUPTED = 130


@app.command()
def sim(
    study: Annotated[str, typer.Argument(help="A study file, or the name of one in sims/ (see `fedasync list`).")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. --set run.time_s=100. Repeatable."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a processor).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 … N − 1 instead of the file's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study's results (default: results/NAME).")] = None,
    backend: Annotated[
        Literal["local", "ray"], typer.Option(help="Where runs are made: processes of this machine, or Ray.")
    ] = "local",
) -> None:
    """Run a study under the virtual clock; finished runs are not made again."""
    from fedasync.studies.command import run_study

    raise typer.Exit(run_study(study, changes or [], jobs, seeds, out, backend))


@app.command("list")
def list_studies() -> None:
    """List the studies that `fedasync sim NAME` finds."""
    from fedasync.studies.command import list_studies

    list_studies()


@app.command()
def plan(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A plan file, or the name of one in sims/plans/.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the base, e.g. --set run.versions=20."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a processor).")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the plan's results (default: results/plans/NAME).")
    ] = None,
) -> None:
    """Search a configuration within limits, confirm the best over seeds, and recommend it."""
    from fedasync.studies.plan import run_plan

    raise typer.Exit(run_plan(file, changes or [], jobs, out))


@app.command()
def world(
    study: Annotated[str, typer.Argument(help="A study file, or the name of one in sims/.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. --set population.clients=100. Repeatable."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 … N − 1 instead of the file's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the figures (default: results/NAME/world).")] = None,
) -> None:
    """Draw a study's population before any run: durations, speed and data, who is online, bandwidth."""
    from fedasync.studies.world import show_world

    show_world(study, changes or [], seeds, out)


@app.command()
def plot(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A study's results, e.g. results/NAME.")]) -> None:
    """Draw a study's table and figures again from its finished runs."""
    from fedasync.studies.command import draw

    draw(folder)


@app.command()
def show(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, results/NAME/runs/…")]) -> None:
    """Print a run's conservation ledger, verdicts, staleness and closed forms."""
    from fedasync.studies.show import show_run

    show_run(run)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="An experiment's file, or the name of one in experiments/.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. --set run.time_s=100. Repeatable."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 … N − 1 instead of the file's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: results/NAME).")] = None,
) -> None:
    """Run an experiment for real, on processes of this machine; finished runs are not made again."""
    from fedasync.studies.experiment import run_experiment

    raise typer.Exit(run_experiment(experiment, changes or [], seeds, out))


@app.command("rollout-worker")
def rollout_worker(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where a run with remote workers listens.")],
    key_file: Annotated[
        Path | None, typer.Option(help="A copy of the run's file worker-key (default: the variable FEDASYNC_AUTHKEY).")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs to serve (default: until Ctrl-C).")] = None,
    patience_s: Annotated[float, typer.Option(min=0, help="Seconds to wait while nobody listens.")] = 600.0,
) -> None:
    """Generate answers for runs on another machine, one after the other."""
    from fedasync.studies.rollout_worker_command import serve_runs

    raise typer.Exit(serve_runs(address, key_file, runs, patience_s))


deploy = typer.Typer(no_args_is_help=True, help="Deploy on a federation.")
app.add_typer(deploy, name="deploy")


@deploy.command()
def local(
    clients: Annotated[int, typer.Option(min=1, help="SuperNodes to start.")],
    workload: Annotated[str, typer.Option(help="A workload's name, or the dotted path of your own.")] = "digits",
    strategy: Annotated[str, typer.Option(help="A row of the strategy table.")] = "fedbuff",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key, e.g. --set run.updates=20. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, make one run, show it, and stop them."""
    from fedasync.studies.deploy_local import deploy_local

    raise typer.Exit(deploy_local(clients, workload, strategy, changes or [], out))


Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of a study's results.")]


@app.command()
def replay(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder with its contributions.")]) -> None:
    """Drive the core from a deployment's log, and check every version's weights, bit for bit."""
    from fedasync.studies.replay_command import replay_run

    raise typer.Exit(replay_run(run))


@app.command()
def calibrate(
    runs: Runs,
    probe: Annotated[
        bool,
        typer.Option(help="Real runs on prompts: measure how generating and training slow each other on this machine."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder (default: results/calibrated/RUN).")] = None,
) -> None:
    """Fit the simulator to recorded runs, and write a study that predicts."""
    from fedasync.studies.calibrate_command import calibrate

    raise typer.Exit(calibrate(runs, out, probe=probe))


@app.command()
def predict(
    runs: Runs,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key, e.g. --set strategy.name=areal --set strategy.eta=4. Repeatable.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Measure how generating and training slow each other on this machine.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder (default: results/predicted/RUN).")] = None,
) -> None:
    """Fit the simulator to real runs on prompts, and say how another configuration would go."""
    from fedasync.studies.predict_command import predict

    raise typer.Exit(predict(runs, changes or [], out, probe=probe))


@app.command()
def compare(
    real: Annotated[Path, typer.Argument(metavar="REAL", help="A run, or a study's results: what was measured.")],
    predicted: Annotated[Path, typer.Argument(metavar="SIM", help="A run, or a study's results: what was predicted.")],
    out: Annotated[Path | None, typer.Option(help="Folder of compare.json (default: here).")] = None,
) -> None:
    """Print how far a prediction is from what was measured: times, throughput, order, staleness."""
    from fedasync.studies.compare import compare

    raise typer.Exit(compare([real], [predicted], out))


@app.command("flower-app")
def flower_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, which `flwr run` takes.")],
    workload: Annotated[str, typer.Option(help="A workload's name, or the dotted path of your own.")],
    strategy: Annotated[str, typer.Option(help="A row of the strategy table, or the dotted path of your own.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key, e.g. --set strategy.buffer_size=2. Repeatable."),
    ] = None,
    name: Annotated[str, typer.Option(help="The app's name.")] = "fedasync-app",
) -> None:
    """Write the folder of a deployment on Flower."""
    from fedasync.studies.app_folder_command import write_app_folder

    write_app_folder(folder, workload, strategy, changes or [], name)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where certificates and keys are written.")],
    clients: Annotated[int, typer.Option(min=1, help="SuperNodes, one key pair each.")],
    names: Annotated[list[str] | None, typer.Option("--name", help="The server's host name. Repeatable.")] = None,
    addresses: Annotated[
        list[str] | None, typer.Option("--address", help="The server's IP address. Repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days that the certificates are valid.")] = 30,
    overwrite: Annotated[bool, typer.Option(help="Replace what lies there.")] = False,
) -> None:
    """Make a CA, the server's certificate and the nodes' keys, for a test federation."""
    from fedasync.studies.certs_command import write_certificates

    write_certificates(folder, clients, names or [], addresses or [], days, overwrite=overwrite)


@app.command()
def validate(
    page: Annotated[
        Path | None, typer.Argument(metavar="PAGE", help="The page to write into (docs/validation-rl.md).")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes (default: one a processor).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the studies' results.")] = DEFAULT_OUT,
) -> None:
    """Run the studies of published numbers, and write predicted beside published into a page."""
    from fedasync.studies.validate import validate

    raise typer.Exit(validate(page, jobs, out))


@app.command()
def conformance(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A scenario to play instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Compute the test vectors of FedBuff, FedAsync and others in each framework's convention, or play a scenario."""
    from fedasync.studies.conformance import show

    raise typer.Exit(show(file, as_json=as_json))


def main() -> None:
    """Entry point: every expected error is one line on stderr and a non-zero status."""
    sys.path.insert(
        0, ""
    )  # as for python -m: a user's own modules, named by dotted path, stand in the working directory
    try:
        app()
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        _end("interrupted; the same command goes on from there", INTERRUPTED)
    except ValueError as error:
        if not hasattr(error, "status"):  # no StudyError
            raise
        _end(str(error), error.status)
    except OSError as error:
        _end(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1)


def _end(line: str, status: int) -> NoReturn:
    typer.echo(f"fedasync: {' '.join(line.split())}", err=True)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
