"""Commands to start from, by the name of their command: the first one also completes a refusal."""

from __future__ import annotations

EXAMPLES = {
    "simulate": (
        "wattline simulate llama3-8b --batch 2 --seq-len 4096 --trace run.json.gz",
        "wattline simulate llama3-70b --tp 4 --phase decode --batch 32 --seq-len 8192",
        "wattline simulate qwen3-30b-a3b --ep 4 --ep-mode all_to_all --power-cap-w 500 --json",
    ),
    "plan": (
        "wattline plan llama3-70b --gpus 16 --input-len 2048 --output-len 256 --slo-ttft-s 1",
        "wattline plan llama3-8b --gpus 2 --objective energy --slo-tpot-s 0.02 --launch launch",
    ),
    "serve": (
        "wattline serve llama3-8b --rate-per-s 12 --slo-ttft-s 0.2",
        "wattline serve llama3-8b --replicas 2 --rate-per-s 20 --report served.html",
    ),
    "validate": ("wattline validate records.jsonl --by world,phase",),
    "overlap": (
        "wattline overlap llama3-70b --layers 4 --tp 2,4 --html overlap.html",
        "wattline overlap llama3-70b --layers 4 --tp 4 --chunks 1,2,4 --ctas 8,16 --csv rows.csv",
    ),
    "sweep": ("wattline sweep grid.toml --out rows.parquet",),
    "pareto": ("wattline pareto rows.parquet --html front.html",),
    "best": ('wattline best rows.parquet --objective energy --where "latency_s < 0.5"',),
    "tornado": ("wattline tornado rows.parquet",),
    "inspect": ("wattline inspect trace.json.gz --lint",),
    "replay": ("wattline replay trace.json.gz --sm-clock 1410",),
    "compare": ("wattline compare trace.json.gz --model llama3-8b --stack vllm",),
    "fit": ("wattline fit grid.toml --samples 50 --rows runs.parquet",),
    "kernel gemm": ("wattline kernel gemm --m 8192 --n 8192 --k 8192 --sweep",),
    "kernel grouped": ("wattline kernel grouped --tokens 4096 --experts 128 --top-k 8 --n 1536 --k 2048",),
    "kernel attention": ("wattline kernel attention --batch 64 --seq-len 8192 --decode",),
    "kernel elementwise": ("wattline kernel elementwise --op rmsnorm --rows 8192 --width 4096",),
    "kernel collective": ("wattline kernel collective --op all_reduce --bytes 67108864 --world 4",),
    "kernel dispatch": ("wattline kernel dispatch --world 16 --tokens 128 --hidden 7168 --top-k 8",),
    "kernel combine": ("wattline kernel combine --world 16 --tokens 128 --hidden 7168 --top-k 8",),
    "calibrate": (
        "wattline calibrate --from records/h100-sxm-80gb/calibration --gpu h100",
        "wattline calibrate --out mine.json",
    ),
    "measure": ("wattline measure --model llama3-8b --batch 4 --seq-len 1024 --out rows.jsonl",),
    "ring": ("wattline ring --world 4 --seq-lens 16384,65536",),
    "dit": ("wattline dit --model wan2.1-14b --reuse rate:0.58",),
    "dit select-proxy": ("wattline dit select-proxy metrics.csv --reference output_change",),
    "ui": ("wattline ui",),
    "memory": ("wattline memory llama3-70b --phase decode --batch 64 --seq-len 8192 --tp 4",),
    "gpus": ("wattline gpus",),
    "models": ("wattline models", "wattline models llama3-8b"),
}
