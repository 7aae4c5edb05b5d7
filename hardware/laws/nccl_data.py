"""NCCL's paces by architecture, and what its tuner takes for rates there.

Channels and the tuner's rates: NCCL 2.27 (src/graph/tuning.cc, search.cc: rings over 18, 12 and 18 links of 20, 20 and
40 GB/s; topology dumps of issues 1197 and 1367 have 360 GB/s and 24 channels on H100s); blocks that add in switches:
src/transport/nvls.cc. Everything else: ``python -m hardware.calibrate.fit_nccl FILE`` on two and four H100s, A100s and
B200s (aiconfigurator-core 0.12.0, nccl table, Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping

from hardware.laws.nccl_paces import DensePace, Library, LowPace, PairPace, SimplePace

LIBRARIES: Mapping[str, Library] = {
    "hopper": Library(
        slower_link=1.0,
        channels=24,
        ring_bytes_per_s=360e9,
        low_bytes_per_s=141e9,
        added_ctas=16,
        low=LowPace(
            launch_s=4.40e-6,
            block_s=0.72e-6,
            step_s=0.80e-6,
            full_s={"all_reduce": 0.24e-6, "all_gather": 0.43e-6, "reduce_scatter": 0.26e-6},
            ends={"all_reduce": 1.53e-6, "all_gather": 1.01e-6, "reduce_scatter": 0.93e-6},
            middle={"all_reduce": 0.86e-6, "all_gather": 0.54e-6, "reduce_scatter": 0.42e-6},
        ),
        dense=DensePace(base_s=21.01e-6, share=0.864),
        simple=SimplePace(
            base_s=15.15e-6,
            step_s=2.64e-6,
            fence_s=0.00e-6,
            ends={"all_reduce": 6.61e-12, "all_gather": 4.13e-12, "reduce_scatter": 4.22e-12},
            middle={"all_reduce": 5.26e-12, "all_gather": 2.85e-12, "reduce_scatter": 2.71e-12},
        ),
        pairs=(
            PairPace(base_s=6.58e-6, message_byte_s=140.04e-12, sent_byte_s=16.20e-12),
            PairPace(base_s=13.10e-6, message_byte_s=0.41e-12, sent_byte_s=3.79e-12),
            PairPace(base_s=28.43e-6, message_byte_s=0.44e-12, sent_byte_s=3.03e-12),
        ),
    ),
    "ampere": Library(
        slower_link=1.5,
        channels=24,
        ring_bytes_per_s=240e9,
        low_bytes_per_s=87.7e9,
        added_ctas=0,
        low=LowPace(
            launch_s=7.21e-6,
            block_s=3.03e-6,
            step_s=0.97e-6,
            full_s={"all_reduce": 0.23e-6, "all_gather": 0.61e-6, "reduce_scatter": 0.20e-6},
            ends={"all_reduce": 3.17e-6, "all_gather": 1.68e-6, "reduce_scatter": 1.65e-6},
            middle={"all_reduce": 1.40e-6, "all_gather": 1.03e-6, "reduce_scatter": 0.94e-6},
        ),
        dense=DensePace(base_s=23.68e-6, share=0.646),
        simple=SimplePace(
            base_s=23.81e-6,
            step_s=6.02e-6,
            fence_s=5.59e-6,
            ends={"all_reduce": 10.62e-12, "all_gather": 6.96e-12, "reduce_scatter": 5.97e-12},
            middle={"all_reduce": 8.58e-12, "all_gather": 4.57e-12, "reduce_scatter": 4.41e-12},
        ),
        pairs=(
            PairPace(base_s=11.11e-6, message_byte_s=0.33e-12, sent_byte_s=190.62e-12),
            PairPace(base_s=13.49e-6, message_byte_s=1.21e-12, sent_byte_s=13.79e-12),
            PairPace(base_s=27.32e-6, message_byte_s=1.31e-12, sent_byte_s=4.97e-12),
        ),
    ),
    "blackwell": Library(
        slower_link=0.5,
        channels=32,
        ring_bytes_per_s=720e9,
        low_bytes_per_s=282e9,
        added_ctas=24,
        low=LowPace(
            launch_s=6.84e-6,
            block_s=1.39e-6,
            step_s=1.36e-6,
            full_s={"all_reduce": 0.09e-6, "all_gather": 0.22e-6, "reduce_scatter": 0.12e-6},
            ends={"all_reduce": 1.21e-6, "all_gather": 1.00e-6, "reduce_scatter": 0.86e-6},
            middle={"all_reduce": 0.84e-6, "all_gather": 0.50e-6, "reduce_scatter": 0.43e-6},
        ),
        dense=DensePace(base_s=19.28e-6, share=0.680),
        simple=SimplePace(
            base_s=12.37e-6,
            step_s=3.68e-6,
            fence_s=10.49e-6,
            ends={"all_reduce": 3.86e-12, "all_gather": 2.39e-12, "reduce_scatter": 2.47e-12},
            middle={"all_reduce": 2.78e-12, "all_gather": 1.46e-12, "reduce_scatter": 1.42e-12},
        ),
        pairs=(
            PairPace(base_s=9.68e-6, message_byte_s=23.17e-12, sent_byte_s=55.79e-12),
            PairPace(base_s=14.06e-6, message_byte_s=1.59e-12, sent_byte_s=2.43e-12),
            PairPace(base_s=22.02e-6, message_byte_s=1.47e-12, sent_byte_s=1.60e-12),
        ),
    ),
}
