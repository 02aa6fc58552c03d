"""Tables, figures and timelines of finished runs.

Every figure takes a study's runs, or runs under labels of one's own, and returns a matplotlib ``Figure``::

    metric_over_time({"FedFa": runs, "FedBuff": run}, metric="accuracy")
"""

from fedasync.report.arrangement import Runs
from fedasync.report.cluster_figures import length_bias, shares, staleness_kinds
from fedasync.report.cluster_timeline import cluster_timeline
from fedasync.report.figures import metric_over_time, staleness, utilisation
from fedasync.report.final_by_axis import final_by_axis, final_table, readable_final
from fedasync.report.learning_curves import learning_curves
from fedasync.report.paired import Difference, Speedup, paired_difference, paired_speedup
from fedasync.report.ranking import ranking_table, ranking_tables, readable_ranking
from fedasync.report.ranking_figure import ranking
from fedasync.report.rollouts_table import readable_rollouts, rollouts_table
from fedasync.report.spec import FigureName, Report
from fedasync.report.speedup import speedup, speedup_by_axis
from fedasync.report.statistics import Band, Interval, band, mean_interval
from fedasync.report.study_report import save, write_report
from fedasync.report.table import brief_tables, markdown, readable_table, rich_table, summary_table, write_table
from fedasync.report.throughput_figure import throughput_by_axis
from fedasync.report.timeline import timeline
from fedasync.report.trace import trace_events, write_trace

__all__ = [
    "Band",
    "Difference",
    "FigureName",
    "Interval",
    "Report",
    "Runs",
    "Speedup",
    "band",
    "brief_tables",
    "cluster_timeline",
    "final_by_axis",
    "final_table",
    "learning_curves",
    "length_bias",
    "markdown",
    "mean_interval",
    "metric_over_time",
    "paired_difference",
    "paired_speedup",
    "ranking",
    "ranking_table",
    "ranking_tables",
    "readable_final",
    "readable_ranking",
    "readable_rollouts",
    "readable_table",
    "rich_table",
    "rollouts_table",
    "save",
    "shares",
    "speedup",
    "speedup_by_axis",
    "staleness",
    "staleness_kinds",
    "summary_table",
    "throughput_by_axis",
    "timeline",
    "trace_events",
    "utilisation",
    "write_report",
    "write_table",
    "write_trace",
]
