"""Holistic Trace Analysis on a folder of ranks, its figures as JSON; run by a Python that has it (pandas below 3).

``python -m venv hta && hta/bin/pip install HolisticTraceAnalysis "pandas<3"``; ``WATTLINE_HTA_PYTHON=hta/bin/python``.
"""

import json
import logging
import sys
import tempfile
import warnings

from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found, unused-ignore]  # an extra of its own

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
analysis = TraceAnalysis(trace_dir=sys.argv[1])
kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
idle, _ = analysis.get_idle_time_breakdown(ranks=[0, 1], visualize=False)
queue = analysis.get_queue_length_summary(ranks=[0, 1])
graph, found = analysis.critical_path_analysis(rank=0, annotation="", instance_id=None)
path = list(zip(graph.critical_path_nodes, graph.critical_path_nodes[1:], strict=False))
with tempfile.TemporaryDirectory() as folder:
    often = analysis.get_frequent_cuda_kernel_sequences(operator_name="launch layer", output_dir=folder, rank=0)
figures = {
    "sequences": often.astype(str).to_dict("records"),
    "temporal": analysis.get_temporal_breakdown(visualize=False).to_dict("records"),
    "overlap": analysis.get_comm_comp_overlap(visualize=False).to_dict("records"),
    "kinds": kinds.to_dict("records"),
    "idle": idle.to_dict("records"),
    "queues": len(queue),
    "critical_path_us": float(sum(graph.edges[pair]["weight"] for pair in path)) if found else None,
}
print(json.dumps(figures, default=float))
