"""The server's entry point, which ``flwr run`` starts."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

WHERE = "run configuration"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Serve the deployment that the run configuration describes. What cannot be is one line, and the run has failed."""
    from fedasync.federated.one_thread import one_thread
    from fedasync.flower.configuration import unflatten
    from fedasync.flower.serving import serve
    from fedasync.studies.deployment import build_deployment

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request to the SuperLink
    try:
        with one_thread():
            serve(grid, build_deployment(unflatten(context.run_config), WHERE))
    except (ValueError, RuntimeError) as error:
        logging.getLogger("fedasync.flower").error("the run ends: %s", " ".join(str(error).split()))
        raise
