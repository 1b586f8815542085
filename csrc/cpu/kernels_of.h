// Instantiates every kernel for one Isa: the last include of its translation unit.
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

template <class Isa>
constexpr Kernels kernels_of(const char* name) {
  return {name,
          {attend<Isa, float>, attend<Isa, bf16>, attend<Isa, fp16>},
          {finish<Isa, float>, finish<Isa, bf16>, finish<Isa, fp16>},
          {mean_query<Isa, float>, mean_query<Isa, bf16>, mean_query<Isa, fp16>},
          {importance<Isa, float>, importance<Isa, bf16>, importance<Isa, fp16>,
           importance<Isa, int8_t>, importance<Isa, e4m3>, importance<Isa, e5m2>},
          {merge<Isa, float>, merge<Isa, bf16>, merge<Isa, fp16>},
          {best_children<Isa, float>, best_children<Isa, bf16>, best_children<Isa, fp16>},
          {add_gumbel_noise<Isa, float>, add_gumbel_noise<Isa, bf16>, add_gumbel_noise<Isa, fp16>},
          {rms_norm<Isa, float>, rms_norm<Isa, bf16>, rms_norm<Isa, fp16>},
          {rotate_heads<Isa, float>, rotate_heads<Isa, bf16>, rotate_heads<Isa, fp16>},
          {pack_linear<Isa, float>, pack_linear<Isa, bf16>, pack_linear<Isa, fp16>},
          {multiply_piece<Isa, float>, multiply_piece<Isa, bf16>, multiply_piece<Isa, fp16>},
          {{pack_codes<Isa, float, Codes::k8Bits>, pack_codes<Isa, bf16, Codes::k8Bits>,
            pack_codes<Isa, fp16, Codes::k8Bits>},
           {pack_codes<Isa, float, Codes::k4Bits>, pack_codes<Isa, bf16, Codes::k4Bits>,
            pack_codes<Isa, fp16, Codes::k4Bits>},
           {pack_codes<Isa, float, Codes::kFloat8>, pack_codes<Isa, bf16, Codes::kFloat8>,
            pack_codes<Isa, fp16, Codes::kFloat8>}},
          {{multiply_codes<Isa, float, Codes::k8Bits>, multiply_codes<Isa, bf16, Codes::k8Bits>,
            multiply_codes<Isa, fp16, Codes::k8Bits>},
           {multiply_codes<Isa, float, Codes::k4Bits>, multiply_codes<Isa, bf16, Codes::k4Bits>,
            multiply_codes<Isa, fp16, Codes::k4Bits>},
           {multiply_codes<Isa, float, Codes::kFloat8>, multiply_codes<Isa, bf16, Codes::kFloat8>,
            multiply_codes<Isa, fp16, Codes::kFloat8>}},
          {{dequantise<Isa, float, Codes::k8Bits>, dequantise<Isa, bf16, Codes::k8Bits>,
            dequantise<Isa, fp16, Codes::k8Bits>},
           {dequantise<Isa, float, Codes::k4Bits>, dequantise<Isa, bf16, Codes::k4Bits>,
            dequantise<Isa, fp16, Codes::k4Bits>},
           {dequantise<Isa, float, Codes::kFloat8>, dequantise<Isa, bf16, Codes::kFloat8>,
            dequantise<Isa, fp16, Codes::kFloat8>}},
          {{pack_tiles<Isa, float, Codes::k8Bits>, pack_tiles<Isa, bf16, Codes::k8Bits>,
            pack_tiles<Isa, fp16, Codes::k8Bits>},
           {pack_tiles<Isa, float, Codes::k4Bits>, pack_tiles<Isa, bf16, Codes::k4Bits>,
            pack_tiles<Isa, fp16, Codes::k4Bits>}},
          {{multiply_tiles<Isa, float, Codes::k8Bits>, multiply_tiles<Isa, bf16, Codes::k8Bits>,
            multiply_tiles<Isa, fp16, Codes::k8Bits>},
           {multiply_tiles<Isa, float, Codes::k4Bits>, multiply_tiles<Isa, bf16, Codes::k4Bits>,
            multiply_tiles<Isa, fp16, Codes::k4Bits>}},
          {{dequantise_tile<Isa, float, Codes::k8Bits>, dequantise_tile<Isa, bf16, Codes::k8Bits>,
            dequantise_tile<Isa, fp16, Codes::k8Bits>},
           {dequantise_tile<Isa, float, Codes::k4Bits>, dequantise_tile<Isa, bf16, Codes::k4Bits>,
            dequantise_tile<Isa, fp16, Codes::k4Bits>}},
          {gate_row<Isa, float>, gate_row<Isa, bf16>, gate_row<Isa, fp16>},
          {gated_delta<Isa, float>, gated_delta<Isa, bf16>, gated_delta<Isa, fp16>},
          gated_delta_commit<Isa>,
          {causal_conv<Isa, float>, causal_conv<Isa, bf16>, causal_conv<Isa, fp16>},
          {multiply_registers<Isa, float>, multiply_registers<Isa, bf16>,
           multiply_registers<Isa, fp16>}};
}

}  // namespace specattn
