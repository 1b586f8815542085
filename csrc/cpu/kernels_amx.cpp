#if defined(__x86_64__)

#include "portable.h"

#define SPECATTN_BF16
#pragma GCC target( \
    "amx-tile,amx-bf16,avx512bf16,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "full_registers_amx.h"
#include "isa_amx.h"
#include "linear_amx.h"
#include "kernels_of.h"

namespace specattn {
namespace {

// Vectors of floats: beside a matrix unit, pairwise products are slower than two of them.
struct AmxFloats : Amx {
  template <class Elem>
  struct Dot : Avx512::Dot<Elem> {};
};

constexpr Kernels amx_kernels_named(const char* name) {
  constexpr int type = static_cast<int>(dtype_of<bf16>());
  Kernels own = {};
  own.name = name;
  set_kernels<Amx, bf16>(own);
  own.pack_codes[0][type] = pack_codes<AmxFloats, bf16, Codes::k8Bits>;
  own.pack_codes[1][type] = pack_codes<AmxFloats, bf16, Codes::k4Bits>;
  own.linear_codes[0][type] = multiply_codes<AmxFloats, bf16, Codes::k8Bits>;
  own.linear_codes[1][type] = multiply_codes<AmxFloats, bf16, Codes::k4Bits>;
  return own;
}

}  // namespace

const Kernels& amx_kernels() {
  static constexpr Kernels kernels = amx_kernels_named("amx");
  return kernels;
}

const Kernels& amx_fp16_kernels() {
  static constexpr Kernels kernels = [] {
    constexpr int type = static_cast<int>(dtype_of<fp16>());
    Kernels own = amx_kernels_named("amx_fp16");
    own.attend[type] = attend<AmxFp16, fp16>;
    own.finish[type] = finish<AmxFp16, fp16>;
    own.pack_linear[type] = pack_linear<AmxFp16, fp16>;
    own.linear[type] = multiply_piece<AmxFp16, fp16>;
    own.multiply_registers[type] = multiply_registers<AmxFp16, fp16>;
    return own;
  }();
  return kernels;
}

}  // namespace specattn

#endif
