"""The trace extracts: unchanged, with their licences, and how they compare with their whole sources."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fedasync.simulation import traces
from fedasync.simulation.laws import Trace
from fedasync.simulation.population import Clients, Population
from fedasync.simulation.traces import FOLDER, SERIES, series

FOLDERS = sorted({one.file.split("/")[0] for one in SERIES.values()})


def licence_of(folder: str) -> str:
    return (FOLDER / folder / "README.md").read_text()


def test_all_extracts_together_are_small_and_every_file_is_read_by_a_law() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    data = {str(path.relative_to(FOLDER)) for path in files if path.suffix == ".csv"}
    assert data == {one.file for one in SERIES.values()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_source_licence_credit_and_changes_travel_with_each_folder(folder: str) -> None:
    text = licence_of(folder)
    for word in ("* Source: ", "commit ", "* Licence: ", "* Credit: ", "* Changes: "):
        assert word in text, word


def test_the_bsd_licence_stands_whole_beside_what_it_covers() -> None:
    text = (FOLDER / "flash" / "LICENSE").read_text()
    for words in ("BSD 2-Clause License", "Copyright (c) 2018, TalwalkarLab", "POSSIBILITY OF SUCH DAMAGE"):
        assert words in text


# Mean, median, 90th and 99th percentile of the whole source, and how far (relative) the extract may lie from them.
WHOLE = {
    "pai_job1": ((1.013, 1.0, 1.105, 1.194), 0.01),
    "pai_job2": ((0.972, 1.0, 1.064, 1.117), 0.01),
    "pai_job3": ((1.019, 1.0, 1.104, 1.302), 0.01),
    "pai_job4": ((1.239, 1.0, 1.993, 7.185), 0.03),  # every sixth row
    "servegen_r1_input": ((1268.25, 208, 2092, 23423), 0.02),
    "servegen_r1_output": ((1527.419, 792, 3432, 12607), 0.02),
    "servegen_r1_reason_ratio": ((0.702, 0.764, 0.954, 0.992), 0.01),
    "azure2023_code_context": ((2047.848, 1469, 5187.6, 7436), 0.01),
    "azure2023_code_generated": ((27.883, 13, 55, 251.46), 0.03),
    "mooncake_input": ((12035.061, 6909, 27367, 85400.4), 0.02),
    "mooncake_output": ((342.619, 350, 597, 1118.5), 0.03),
    "flash_downlink": ((5854.111 * 1024, 4317.629 * 1024, 9090.977 * 1024, 15997.139 * 1024), 0.03),
    "flash_uplink": ((3665.342 * 1024, 3285.686 * 1024, 5849.74 * 1024, 6571.178 * 1024), 0.03),
    "pai_cov": ((0.398, 0.103, 1.106, 2.852), 0.01),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_law_has_the_mean_and_percentiles_of_its_whole_source(name: str) -> None:
    wanted, within = WHOLE[name]
    values = np.array(series(name))
    found = [values.mean(), *np.quantile(values, [0.5, 0.9, 0.99])]
    assert found == pytest.approx(wanted, rel=within)
    assert Trace(name).mean == pytest.approx(values.mean())


def test_where_an_extract_is_no_fair_sample_its_readme_says_so() -> None:
    """Every 40th of FLASH's grid has other sizes than the whole, but the same ratios between phones."""
    nexus, note = (np.mean(series(f"flash_{phone}_lstm")) for phone in ("nexus6", "samsung_note10"))
    assert nexus > 1.5 * 1.409
    assert nexus / note == pytest.approx(1.409 / 0.456, rel=0.03)
    assert "not a fair sample" in licence_of("flash")
    # The first 12,000 of Azure's 19,366 chat requests generate a little less.
    assert np.median(series("azure2023_conv_generated")) < 129
    assert "first 12,000 of 19,366" in licence_of("azure")


def test_ratios_are_to_the_median_so_scale_is_the_median_of_the_law() -> None:
    law = Trace("pai_job4", scale=20.0)
    assert law.quantile(0.5) == pytest.approx(20.0, rel=0.03)
    assert law.quantile(0.999) > 100


def test_a_trace_can_be_each_of_a_populations_laws() -> None:
    population = Population(
        clients=50,
        duration_s=Trace("pai_job4", scale=10.0),
        downlink_bytes_per_second=Trace("flash_downlink"),
        model_bytes=10**6,
    )
    clients = Clients(population, 3)
    seconds = [10**6 / rate for rate in series("flash_downlink")]
    assert set(clients.fixed_s) <= set(seconds)
    assert min(clients.work_s(client, 0, 0) - clients.fixed_s[client] for client in range(50)) > 0


@pytest.fixture
def changed_file(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(traces._DIGESTS, "pai/minibatch_cov.csv", "0" * 64)
    series.cache_clear()
    yield
    series.cache_clear()


@pytest.mark.usefixtures("changed_file")
def test_a_changed_file_is_refused() -> None:
    with pytest.raises(ValueError, match="is not the file that fedasync ships"):
        series("pai_cov")


@pytest.mark.parametrize(
    ("name", "scale", "told"),
    [
        ("pai_jop4", 1.0, "trace: unknown name 'pai_jop4'; did you mean 'pai_job4'"),
        ("pai_job4", 0.0, "trace: scale must be > 0 and finite, got 0.0"),
        ("pai_job4", float("inf"), "trace: scale must be > 0 and finite, got inf"),
    ],
)
def test_a_trace_that_is_none_is_refused(name: str, scale: float, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Trace(name, scale)
