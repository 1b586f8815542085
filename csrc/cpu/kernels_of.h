// Instantiates kernels for one Isa: the last include of its translation unit.
#pragma once

#include "attention.h"
#include "beam.h"
#include "causal_conv.h"
#include "finish.h"
#include "full_registers.h"
#include "gated_delta.h"
#include "gated_delta_commit.h"
#include "gumbel.h"
#include "importance.h"
#include "layer.h"
#include "linear_finish.h"
#include "linear_quantised.h"
#include "linear_tiles.h"
#include "merge.h"

namespace specattn {

template <class Isa, class Elem, Codes kCodes>
constexpr void set_kernels_for_codes(Kernels& all) {
  constexpr int codes = kernel_of(kCodes), type = static_cast<int>(dtype_of<Elem>());
  all.pack_codes[codes][type] = pack_codes<Isa, Elem, kCodes>;
  all.linear_codes[codes][type] = multiply_codes<Isa, Elem, kCodes>;
  all.dequantise[codes][type] = dequantise<Isa, Elem, kCodes>;
  if constexpr (kCodes != Codes::kFloat8) {
    all.pack_tiles[codes][type] = pack_tiles<Isa, Elem, kCodes>;
    all.linear_tiles[codes][type] = multiply_tiles<Isa, Elem, kCodes>;
    all.dequantise_tile[codes][type] = dequantise_tile<Isa, Elem, kCodes>;
  }
}

// Sets what computes with elements of one type.
template <class Isa, class Elem>
constexpr void set_kernels(Kernels& all) {
  constexpr int type = static_cast<int>(dtype_of<Elem>());
  all.attend[type] = attend<Isa, Elem>;
  all.finish[type] = finish<Isa, Elem>;
  all.mean_query[type] = mean_query<Isa, Elem>;
  all.importance[type] = importance<Isa, Elem>;
  all.merge[type] = merge<Isa, Elem>;
  all.best_children[type] = best_children<Isa, Elem>;
  all.add_gumbel_noise[type] = add_gumbel_noise<Isa, Elem>;
  all.rms_norm[type] = rms_norm<Isa, Elem>;
  all.rotate_heads[type] = rotate_heads<Isa, Elem>;
  all.pack_linear[type] = pack_linear<Isa, Elem>;
  all.linear[type] = multiply_piece<Isa, Elem>;
  set_kernels_for_codes<Isa, Elem, Codes::k8Bits>(all);
  set_kernels_for_codes<Isa, Elem, Codes::k4Bits>(all);
  set_kernels_for_codes<Isa, Elem, Codes::kFloat8>(all);
  all.gate[type] = gate_row<Isa, Elem>;
  all.gated_delta[type] = gated_delta<Isa, Elem>;
  all.causal_conv[type] = causal_conv<Isa, Elem>;
  all.multiply_registers[type] = multiply_registers<Isa, Elem>;
}

template <class Isa>
constexpr Kernels kernels_of(const char* name) {
  Kernels all = {};
  all.name = name;
  set_kernels<Isa, float>(all);
  set_kernels<Isa, bf16>(all);
  set_kernels<Isa, fp16>(all);
  all.importance[static_cast<int>(dtype_of<int8_t>())] = importance<Isa, int8_t>;
  all.importance[static_cast<int>(dtype_of<e4m3>())] = importance<Isa, e4m3>;
  all.importance[static_cast<int>(dtype_of<e5m2>())] = importance<Isa, e5m2>;
  all.gated_delta_commit = gated_delta_commit<Isa>;
  return all;
}

}  // namespace specattn
