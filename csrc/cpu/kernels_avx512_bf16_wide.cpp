#if defined(__x86_64__)

#include "portable.h"

#define SPECATTN_BF16
#pragma GCC target("avx512bf16,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "isa_avx512.h"
#include "attention.h"

namespace specattn {

const WideAttend& wide_attend() {
  static constexpr WideAttend found = {attend<Avx512Bf16Wide, float>, attend<Avx512Bf16Wide, bf16>};
  return found;
}

}  // namespace specattn

#endif
