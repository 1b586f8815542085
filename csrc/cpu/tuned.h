// The rows that bench/tune_cpu.py has measured, with what differs from the values in tuning.h.
#pragma once

namespace specattn {

inline constexpr char kTuned[] = R"(
avx512_bf16 amd 26 48 1024: wide=1 panels=1 stream_ahead=1024 thread_work=131072
)";

}  // namespace specattn
