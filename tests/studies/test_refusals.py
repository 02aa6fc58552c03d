"""What cannot run is refused before anything runs: status 2, one line, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from .experiments import EXPERIMENT
from .rl_studies import REAL
from .running import LEARNING, TIMING, Command, apart, changed, contents

LAW = '{ kind = "exponential", mean = 10.0 }'
STRATEGY = 'name = "fedbuff"\nconcurrency = 4\nbuffer_size = 2'
AXIS = '\n[[axis]]\nname = "a"\n'


def refused(fedasync: Command, study: Path, text: str, *options: str) -> str:
    study.write_text(text)
    end = fedasync("sim", "s.toml", *options)
    assert end.status == 2
    assert end.out == ""
    assert not Path("results").exists()
    return end.complaint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[run]", "[rum]", "s.toml: rum: unknown table; did you mean 'run'?"),
        ("updates = 40", "updatse = 40", "s.toml: run.updatse: unknown key; did you mean 'updates'?"),
        ("updates = 40", 'updates = "40"', 's.toml: run.updates: got "40"; an integer would do'),
        ("updates = 40", "updates = 40.5", "s.toml: run.updates: got 40.5; an integer would do"),
        ("updates = 40", "updates = true", "s.toml: run.updates: got true; an integer would do"),
        ("updates = 40", "time_s = 2024-01-01", 's.toml: run.time_s: got "2024-01-01"; a number would do'),
        ("updates = 40", "time_s = nan", "s.toml: run.time_s: got nan; a finite number would do"),
        ("updates = 40", "time_s = -5", "time_s must be > 0 and finite, got -5"),
        ("updates = 40", "", "a run needs an end: give time_s, updates, or versions"),
        ("updates = 40", "updates = 1", "makes its first version from 2 contributions, which a run of updates = 1"),
        ('kind = "exponential", ', "", "s.toml: population.duration_s.kind: this key is missing; 'constant', "),
        ('"exponential"', '"expo"', "s.toml: population.duration_s.kind: got \"expo\"; 'constant', 'values'"),
        ("mean = 10.0", "mean = -1", "population.duration_s: exponential: mean must be > 0 and finite, got -1"),
        ("mean = 10.0", "man = 10.0", "population.duration_s.man: unknown key; did you mean 'mean'?"),
        (LAW, '{ kind = "values", values = [1, 2] }', "2 values for 8 clients; one for each client would do"),
        (LAW, '{ kind = "empirical", file = "no.csv", column = "s" }', "no.csv cannot be read: No such file"),
        (LAW, '{ kind = "empirical", file = ".", column = "s" }', ". cannot be read: Is a directory"),
        (LAW, '{ kind = "empirical", file = "d.csv", column = "t" }', "d.csv has no column 't'; it has a, s"),
        (LAW, '{ kind = "empirical", file = "d.csv", column = "s" }', "d.csv, line 3, column 's': 'x' is no number"),
        (LAW, f"{LAW}\ncrash_probability = 0.1", "a crashed client never answers"),
        ("concurrency = 4", "concurrency = 9", "a concurrency of 9 can never be reached by 8 clients, one lease"),
        (STRATEGY, 'name = "fedavg"\ncohort = 9', "a cohort of 9 can never be filled by 8 clients; cohort ≤ 8"),
        (STRATEGY, 'name = "fedavg"\ncohort = 4\nkeep = 5', "a cohort of 4 can keep 1 to 4 results, got keep = 5"),
        ("buffer_size = 2", "buffer_size = 0", "got 0"),
        ("buffer_size = 2", "max_staleness = -1", "max_staleness must be an integer ≥ 0, got -1"),
        ('name = "fedbuff"', "", "s.toml: strategy.name: this key is missing; one of fedavg, fedprox, "),
        ('name = "fedbuff"', 'name = "fedbuf"', "strategy.name: unknown name 'fedbuf'; did you mean 'fedbuff'?"),
        (STRATEGY, 'name = "no.such"', "strategy.name: 'no.such': importing it raised ModuleNotFoundError: No module"),
        (STRATEGY, 'name = "broken.it"', "strategy.name: 'broken.it': importing it raised SyntaxError: "),
        (STRATEGY, 'name = "own_code.nope"', "strategy.name: 'own_code.nope': module own_code has no nope"),
        (STRATEGY, 'name = "own_code.CLIENT"', "strategy.name: 'own_code.CLIENT' is no class and no function"),
        (STRATEGY, 'name = "own_code."', "strategy.name: unknown name 'own_code.'"),
        (STRATEGY, 'name = "quits.it"', "s.toml: the user's code raised SystemExit: 3"),
        (STRATEGY, 'name = "own_code.no_strategy"\nconcurrency = 4', "no_strategy returned int; a Strategy would do"),
        (STRATEGY, 'name = "own_code.bankrupt"\nconcurrency = 4', "bankrupt raised KeyError: 'funds'"),
        (STRATEGY, 'name = "own_code.median"\nconcurency = 4', "strategy.concurency: unknown key; did you mean"),
        ("seeds = 1", "seeds = 0", "s.toml: study: seeds must be an integer ≥ 1 or a list, got 0"),
        ("seeds = 1", "seeds = [1, 1]", "study: seeds must differ, got [1, 1]"),
        ("seeds = 1", "seeds = true", "s.toml: study.seeds: got true; an integer would do"),
        ('title = "small"', "", "s.toml: study.title: this key is missing"),
        ("[run]\nupdates = 40", "", "s.toml: the table [run] is missing"),
        ("[run]", "[run", "s.toml is not TOML: "),
        ("[study]", "axis = [1]\n[study]", "s.toml: axis: must be a table, written as [[axis]]"),
        ("clients = 8", "clients = 0", "population: clients must be an integer ≥ 1, got 0"),
        ("clients = 8", "", "population: clients is missing; an integer ≥ 1 would do"),
    ],
)
def test_a_study_that_cannot_run(fedasync: Command, study: Path, old: str, new: str, said: str) -> None:
    Path("d.csv").write_text("a,s\n1,2\n1,x\n")
    Path("broken.py").write_text("def it(:\n")
    Path("quits.py").write_text("raise SystemExit(3)\n")
    line = refused(fedasync, study, changed(TIMING, (old, new)))
    assert said in line
    assert "s.toml" in line


@pytest.mark.parametrize(
    ("knob", "said"),
    [
        ('aggregator = { kind = "median", share = 0.2 }', "aggregator.share: unknown key (known: kind)"),
        (
            'aggregator = { kind = "krum", byzantin = 1 }',
            "aggregator.byzantin: unknown key; did you mean 'byzantine'? (known: byzantine, keep, kind)",
        ),
        ('aggregator = { kind = "mode" }', "aggregator.kind: got \"mode\"; 'mean', 'median', 'trimmed_mean', 'krum', "),
        ("aggregator = { share = 0.2 }", "aggregator.kind: this key is missing; 'mean', 'median', 'trimmed_mean', "),
        ("aggregator = {}", "aggregator.kind: this key is missing; 'mean', "),
        (
            "privacy = { noise_multiplier = 1.0, detla = 1e-5 }",
            "privacy.detla: unknown key; did you mean 'delta'? (known: delta, noise_multiplier)",
        ),
        ("privacy = { noise = 1.0 }", "privacy.noise: unknown key (known: delta, noise_multiplier)"),
        ("lease_timeout_s = { first_s = 1.0 }", "lease_timeout_s.kind: this key is missing; 'adaptive' would do"),
        (
            'lease_timeout_s = { kind = "adaptive", first_s = 1.0, factr = 3.0 }',
            "lease_timeout_s.factr: unknown key; did you mean 'factor'? (known: at_least, factor, ",
        ),
        (
            'lease_timeout_s = { kind = "adaptive", first_s = "x" }',
            'lease_timeout_s.first_s: got "x"; a number would do',
        ),
        ('lease_timeout_s = "x"', 'lease_timeout_s: got "x"; a number would do'),
        ("publish_evry = 2", "publish_evry: unknown key; did you mean 'publish_every'? (known: aggregator, "),
    ],
)
def test_a_shared_knob_that_is_a_table_is_looked_into(fedasync: Command, study: Path, knob: str, said: str) -> None:
    line = refused(fedasync, study, changed(TIMING, (STRATEGY, f"{STRATEGY}\n{knob}")))
    assert f"s.toml: strategy.{said}" in line


@pytest.mark.parametrize(
    "strategy",
    [
        'name = "ringmaster"\nconcurrency = 4\ndelay_threshold = 2',
        'name = "rennala"\nconcurrency = 4\nbuffer_size = 2',
        'name = "safa"\nconcurrency = 4\nquota = 2',
    ],
)
def test_a_strategy_with_a_bound_of_its_own_takes_no_other(fedasync: Command, study: Path, strategy: str) -> None:
    line = refused(fedasync, study, changed(TIMING, (STRATEGY, f"{strategy}\nmax_staleness = 3")))
    name = strategy.split('"')[1]
    assert line.startswith(f"fedasync: s.toml: strategy: {name} has its own bound on the delay")
    assert line.endswith("takes no max_staleness")


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("", "axis a: give either key and values, or points"),
        ('key = "run.updates"\nvalues = [50]\npoints = []', "axis a: give either key and values, or points"),
        ("points = []", "axis a: points is a list of tables, at least one"),
        ("values = [1]", "axis a: key is a dotted key such as"),
        ('key = "run.updatse"\nvalues = [50]', "s.toml (a = 50): run.updatse: unknown key; did you mean 'updates'?"),
        ('key = "run.updates"\nvalues = [50, -1]', "s.toml (a = -1): run: updates must be an integer ≥ 1, got -1"),
        ('key = "rum.updates"\nvalues = [50]', "axis a: rum.updates: unknown table; did you mean 'run'?"),
        ('key = "targets.w"\nvalues = [50]', "axis a: targets.w: unknown table (known: cluster, faults, objective"),
        ('key = "run.updates"\nvalues = [50, 50]', "axis a: two points have the label '50'; give them different"),
        ('key = "run.updates"\nvalues = [50, 60]\nlabels = ["x", "x"]', "axis a: two points have the label 'x'"),
        ('key = "run.updates"\nvalues = [50, 60]\nlabels = ["x"]', "axis a.labels: one text for each of the 2"),
        ('points = [{ label = "x" }]\nlabels = ["y"]', "axis a.labels: unknown key (known: name, points)"),
        ('points = [{ label = "x" }, { label = "x" }]', "axis a: two points have the label 'x'"),
        ('points = [{ label = "x y" }, { label = "x-y" }]', "two points of the axes are one and the same run"),
        ('points = [{ label = "x", strategy = "fedavg" }]', "s.toml (a = x): strategy: got 'fedavg'; a table"),
        ('points = [{ label = "x", runn.updates = 50 }]', "axis a: runn.updates: unknown table; did you mean 'run'?"),
        ("points = [{ run.updates = 50 }]", "axis a, point 1: a table with a label would do, got"),
        ('points = [{ label = ["x", "y"] }]', "axis a, point 1.label: 1 text(s) for a would do, got ['x', 'y']"),
        (f'key = "run.updates"\nvalues = [50]{AXIS}key = "run.time_s"\nvalues = [9]', "two axes have the same name"),
        (
            'key = "run.updates"\nvalues = [50]\n[[axis]]\nname = "b"\nkey = "run.updates"\nvalues = [60]',
            "axis b: run.updates is set by axis a already",
        ),
        ('ky = "run.updates"\nvalues = [50]', "axis a.ky: unknown key; did you mean 'key'?"),
    ],
)
def test_an_axis_that_says_nothing_or_two_things(fedasync: Command, study: Path, axis: str, said: str) -> None:
    assert said in refused(fedasync, study, TIMING + AXIS + axis + "\n")


def test_an_axis_may_not_take_two_names_for_one_key(fedasync: Command, study: Path) -> None:
    axis = '\n[[axis]]\nname = ["a"]\nkey = "run.updates"\nvalues = [50]\n'
    assert "axis a.name: got ['a']; a text would do" in refused(fedasync, study, TIMING + axis)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("run.updates", "--set run.updates: write it as dotted.key=value"),
        ("=5", "--set =5: write it as dotted.key=value"),
        ("rum.updates=5", "--set rum.updates=5: unknown table; did you mean 'run'?"),
        (
            "targets.w=5",
            "--set targets.w=5: unknown table (known: cluster, faults, objective, optimiser, policy",
        ),
        ("run.updates.x=5", "--set run.updates.x=5: run.updates is no table"),
        ("run.updates=[", 's.toml (a = 10): run.updates: got "["; an integer would do'),
        ("run.time_s=inf", "--set run.time_s=inf: value: got inf; a finite number would do"),
        ("population.clients=7", "--set population.clients=7: an axis varies population.clients; change the axis"),
        ("population={}", "--set population={}: an axis varies population.clients; change the axis in the file"),
        ("strategy=fedavg", "strategy: got 'fedavg'; a table would do"),
        ("run=5", "run: got 5; a table would do"),
    ],
)
def test_a_change_that_cannot_be_made(fedasync: Command, study: Path, change: str, said: str) -> None:
    text = TIMING + AXIS + 'key = "population.clients"\nvalues = [10, 20]\n'
    assert said in refused(fedasync, study, text, "--set", change)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ('series = "b"', "report.series: no axis 'b'; there are: 'a'"),
        ('facets = ["b"]', "report.facets: no axis 'b'; there are: 'a'"),
        ('x_axis = "b"', "report.x_axis: no axis 'b'; there are: 'a'"),
        ('series = "a"\nbaseline = "z"', "report.baseline: no label 'z' on axis 'a'; there are: '10', '20'"),
        (
            'series = "a"\nclaims = [{ series = "10", over = "z", times = 2.0, source = "s" }]',
            "report.claims: no label 'z' on axis 'a'",
        ),
        ('metrics = "w"', "report.metrics: unknown key; did you mean 'metric'?"),
        ('figures = ["timelime"]', "report.figures.0: got \"timelime\"; 'metric_over_time'"),
        ('figures = ["speedup"]', "figure 'speedup' needs one; give a label of axis 'strategy'"),
    ],
)
def test_a_report_of_what_does_not_exist(fedasync: Command, study: Path, report: str, said: str) -> None:
    text = TIMING + AXIS + 'key = "population.clients"\nvalues = [10, 20]\n'
    assert said in refused(fedasync, study, changed(text, ("figures = []", report)))


def test_a_baseline_on_strategies_that_stand_on_an_axis_of_another_name(fedasync: Command, study: Path) -> None:
    """Series are the strategies' names then, which is told before any run, as is where the label stands."""
    axis = """
[[axis]]
name = "s"
points = [{ label = "A", strategy = { name = "fedavg", cohort = 4 } }, { label = "B" }]
"""
    text = changed(TIMING, ("figures = []", 'figures = []\nbaseline = "A"')) + axis
    line = refused(fedasync, study, text)
    assert line == (
        "fedasync: s.toml: report.baseline: no label 'A' on axis 'strategy'; there are: 'fedavg', 'fedbuff'; "
        "report.series = 's', which has it, would do"
    )
    study.write_text(changed(text, ('baseline = "A"', 'baseline = "fedavg"')))
    assert fedasync("sim", "s.toml").status == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "quadratic"', "", "s.toml: workload.kind: this key is missing; one of digits, quadratic, "),
        (
            'kind = "quadratic"',
            'kind = "quadratc"',
            "workload.kind: unknown name 'quadratc'; did you mean 'quadratic'?",
        ),
        ('kind = "quadratic"', 'kind = "no.such"', "workload.kind: 'no.such': importing it raised ModuleNotFoundError"),
        ('kind = "quadratic"', 'kind = "own_code.Nope"', "workload.kind: 'own_code.Nope': module own_code has no Nope"),
        (
            'kind = "quadratic"',
            'kind = "own_code.NotAWorkload"',
            "NotAWorkload is no workload: it has no client_samples",
        ),
        (
            'kind = "quadratic"',
            'kind = "own_code.Empty"',
            "client 3 has 0 training samples; every client needs at least",
        ),
        ('kind = "quadratic"', 'kind = "own_code.RaisesInTrain"\ndrfit = 1.0', "workload.drfit: unknown key; did you"),
        ("clients = 8", "clients = -8", "s.toml: workload: Quadratic: clients must be an integer"),
        ("clients = 8", "clients = 8\ncontraction = 2.0", "workload: Quadratic: contraction must"),
        ("[population]", "[population]\nclients = 9", "population.clients = 9, but the workload has 8 clients"),
        ("[run]", "[targets]\nw = nan\n[run]", "s.toml: targets.w: got nan; a finite number would do"),
        ("[run]", '[targets]\nw = "1"\n[run]', 's.toml: targets.w: got "1"; a number would do'),
    ],
)
def test_a_workload_that_cannot_be_made(fedasync: Command, study: Path, old: str, new: str, said: str) -> None:
    assert said in refused(fedasync, study, changed(LEARNING, (old, new)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.toml", "no.toml cannot be read: No such file or directory"),
        ("sub/folder", "sub/folder cannot be read: Is a directory"),
        ("bytes.toml", "bytes.toml cannot be read: 'utf-8' codec can't decode"),
        ("heterogenity", "no study is called 'heterogenity'; did you mean 'heterogeneity'?"),
        (".", "no study is called '.' (known: "),
    ],
)
def test_a_study_that_is_not_there(fedasync: Command, name: str, said: str) -> None:
    Path("sub/folder").mkdir(parents=True)
    Path("bytes.toml").write_bytes(b"\xff\xfe")
    end = fedasync("sim", name)
    assert end.status == 2
    assert said in end.complaint
    assert not Path("results").exists()


def test_a_line_break_in_a_message_makes_no_second_line(fedasync: Command, study: Path) -> None:
    text = changed(TIMING, (STRATEGY, 'name = "own_code.verbose"\nconcurrency = 4'))
    assert refused(fedasync, study, text).endswith("s.toml: strategy: 4 is too much; less would do")


def test_the_installed_command_refuses_with_status_2_and_one_line(folder: Path, study: Path) -> None:
    study.write_text(changed(TIMING, ("updates = 40", "updatse = 40")))
    end = apart("sim", "s.toml", cwd=folder)
    assert (end.status, end.out) == (2, "")
    assert "s.toml: run.updatse: unknown key; did you mean 'updates'?" in end.complaint
    assert not (folder / "results").exists()


@pytest.mark.parametrize("words", [("sim",), ("sim", "s.toml", "--jobs", "0"), ("smi", "s.toml")])
def test_a_wrong_command_says_how_it_is_written(fedasync: Command, words: tuple[str, ...]) -> None:
    end = fedasync(*words)
    assert (end.status, end.out) == (2, "")
    assert end.err.startswith("Usage: ")


NEEDS = "a folder of results (--out), new or this study's, would do"


@pytest.mark.parametrize("words", [("sim", "s.toml"), ("run", "e.toml"), ("run", "f.toml")])
def test_an_output_folder_that_cannot_be_one_is_refused_before_anything_starts(
    fedasync: Command, folder: Path, words: tuple[str, str]
) -> None:
    for name, text in (("s.toml", TIMING), ("e.toml", REAL), ("f.toml", EXPERIMENT)):
        (folder / name).write_text(text)
    Path("taken").write_text("mine")
    Path("other", "x").mkdir(parents=True)
    Path("other", "thesis.txt").write_text("mine")
    for out, complaint in {
        "taken": f"taken is a file; {NEEDS}",
        "taken/a/b": f"taken is a file, so nothing can be written to taken/a/b; {NEEDS}",
        "other": "other has 'thesis.txt' and 1 more in it, and is no folder of results; a new or empty one (--out) "
        "would do",
    }.items():
        end = fedasync(*words, "--out", out)
        assert (end.status, end.out, end.complaint) == (2, "", f"fedasync: {complaint}")
    assert sorted(path.name for path in Path("other").iterdir()) == ["thesis.txt", "x"]
    assert Path("taken").read_text() == "mine"


def test_results_of_another_study_are_left_alone(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    Path("t.toml").write_text(TIMING)
    assert fedasync("sim", "s.toml", "--out", "out").status == 0
    before = contents(Path("out"))
    end = fedasync("sim", "t.toml", "--out", "out")
    said = "out has the results of 's', and these are of 't'; another one (--out) would do"
    assert (end.status, end.complaint) == (2, f"fedasync: {said}")
    assert contents(Path("out")) == before


def test_folders_that_runs_leave_before_they_are_published_are_no_obstacle(fedasync: Command, study: Path) -> None:
    study.write_text(TIMING)
    for name in ("runs", "world", "calibration", ".cache", "of-another-study"):
        Path("out", name).mkdir(parents=True)
    Path("out", "predicted.toml").write_text("")
    Path("out", "of-another-study", "study.json").write_text("{}")
    assert fedasync("sim", "s.toml", "--out", "out").status == 0


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        (
            "run",
            "staleness_sweep",
            "no experiment is called 'staleness_sweep'; it is a study, which is for `fedasync sim",
        ),
        (
            "run",
            "areal_128",
            "no experiment is called 'areal_128'; it is a plan, which is for `fedasync plan areal_128`",
        ),
        ("sim", "reverse", "no study is called 'reverse'; it is an experiment, which is for `fedasync run reverse`"),
        ("sim", "fedbuff", "no study is called 'fedbuff'; it is a plan, which is for `fedasync plan fedbuff`"),
        ("plan", "reverse", "no plan is called 'reverse'; it is an experiment, which is for `fedasync run reverse`"),
        ("plan", "algorithms", "no plan is called 'algorithms'; it is a study, which is for `fedasync sim algorithms`"),
        ("run", "own", "no experiment is called 'own'; it is a study, which is for `fedasync sim own`"),
        ("run", "revers", "no experiment is called 'revers'; did you mean 'reverse'? (known: "),
    ],
)
def test_a_name_that_is_for_another_command(
    fedasync: Command, folder: Path, command: str, name: str, said: str
) -> None:
    (folder / "sims").mkdir()
    (folder / "sims" / "own.toml").write_text(TIMING)
    end = fedasync(command, name)
    assert end.status == 2
    assert end.complaint.startswith(f"fedasync: {said}")
