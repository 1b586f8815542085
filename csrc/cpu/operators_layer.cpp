// what a pass consists of besides attention: embeddings, norms, rotation, new keys
// and values, products of few rows, the children of a draft tree, and the noise of sampling.
#include "operators.h"
#include "check.h"

using namespace specattn;

namespace {

struct EmbedCall : PlainCall<Embed> {
  void check() const override {
    for (int64_t i = 0; i < B * T; ++i) check_index("tokens", token(i), 0, vocabulary - 1);
  }
};

struct RotateCall : PlainCall<RotateHeads> {
  bool stores = false;

  void check() const override {
    for (int64_t b = 0; b < B; ++b) {
      if (stores && first_slot < 0) check_index("prefix", prefix[b], 0, capacity - T);
      for (int64_t t = 0; t < T; ++t) {
        check_index("positions", prefix[b] + depth(b, t), 0, positions - 1);
      }
    }
  }
};

struct WriteCall : PlainCall<WriteKV> {
  void check() const override {
    for (int64_t i = 0; i < B * T; ++i) {
      const int64_t slot_of_i = slot(i / T, i % T);
      if (slot_of_i >= 0) check_index("slots", slot_of_i, 0, pages * page_size - 1);
    }
  }
};

Dtype floating_rows(const View& x) {
  if (x.dims != 2 || x.dtype > Dtype::kFloat16) {
    x.fail("must have 2 dimensions and be float32, bfloat16 or float16");
  }
  return x.dtype;
}

Made embed(Arguments& next) {
  auto call = std::make_unique<EmbedCall>();
  EmbedCall& p = *call;
  const View tokens = next.tensor("tokens"), weight = next.tensor("weight");
  const View out = next.tensor("out");
  p.dtype = floating_rows(weight);
  p.B = tokens.expect(Dtype::kInt64, {-1, -1}).shape[0], p.T = tokens.shape[1];
  p.vocabulary = weight.shape[0], p.H = weight.shape[1];
  out.expect(p.dtype, {p.B * p.T, p.H});
  p.tokens = tokens.as<int64_t>(), p.tokens_batch = tokens.stride[0];
  p.weight = weight.data, p.weight_row = weight.stride[0];
  p.out = out.data, p.out_row = out.stride[0];
  return call;
}

Made rms_norm(Arguments& next) {
  auto call = std::make_unique<PlainCall<RmsNorm>>();
  RmsNorm& p = *call;
  const View x = next.tensor("x"), weight = next.tensor("weight");
  p.dtype = floating_rows(x);
  p.M = x.shape[0], p.H = x.shape[1];
  weight.expect_dense(p.dtype, p.H);
  p.eps = static_cast<float>(next.value<double>());
  const View out = next.tensor("out");
  out.expect(p.dtype, {p.M, p.H});
  p.x = x.data, p.x_row = x.stride[0], p.weight = weight.data;
  p.out = out.data, p.out_row = out.stride[0];
  return call;
}

Made rotate_heads(Arguments& next) {
  auto call = std::make_unique<RotateCall>();
  RotateCall& p = *call;
  const View heads = next.tensor("heads");
  p.dtype = floating(heads);
  p.Hq = next.value<int64_t>();
  p.B = heads.shape[0], p.T = heads.shape[1], p.D = heads.shape[3];
  p.Hk = (heads.shape[2] - p.Hq) / 2;
  if (p.Hq < 0 || p.Hk < 0 || p.Hq + 2 * p.Hk != heads.shape[2]) {
    heads.fail("must be of queries, keys, values");
  }
  p.heads = heads.data;
  p.batch = heads.stride[0], p.row = heads.stride[1], p.head = heads.stride[2];
  const View q_norm = next.tensor("q_norm"), k_norm = next.tensor("k_norm");
  if (q_norm) p.q_norm = q_norm.expect_dense(p.dtype, p.D).data;
  if (k_norm) p.k_norm = k_norm.expect_dense(p.dtype, p.D).data;
  p.eps = static_cast<float>(next.value<double>());
  const View cos = next.tensor("cos"), sin = next.tensor("sin");
  p.positions = cos.expect(Dtype::kFloat32, {-1, -1}).shape[0], p.half = cos.shape[1];
  sin.expect(Dtype::kFloat32, {p.positions, p.half});
  if (2 * p.half > p.D) cos.fail("must turn at most a whole head");
  if (sin.stride[0] != cos.stride[0]) sin.fail("must have the strides of cos");
  p.cos = cos.as<float>(), p.sin = sin.as<float>(), p.table_row = cos.stride[0];
  p.prefix = next.tensor("prefix").expect_dense(Dtype::kInt32, p.B).as<int32_t>();
  const View depths = next.tensor("depths");
  if (depths) {
    depths.expect(Dtype::kInt32, {depths.shape[0] == 1 ? 1 : p.B, p.T});
    p.depths = depths.as<int32_t>(), p.depths_batch = depths.step(0);
  }
  const View k = next.tensor("k_cache"), v = next.tensor("v_cache");
  if (k) {
    p.cache_dtype = of_8_bits(k.dtype) ? k.dtype : p.dtype;
    p.capacity = k.expect(p.cache_dtype, {p.B, -1, p.Hk, p.D}).shape[1];
    v.expect(p.cache_dtype, {p.B, p.capacity, p.Hk, p.D});
    p.k_cache = k.rows(), p.v_cache = v.rows(), p.stores = true;
  }
  const View k_scale = next.strided("k_scale"), v_scale = next.strided("v_scale");
  if (of_8_bits(p.cache_dtype)) {
    for (const View* x : {&k_scale, &v_scale}) {
      x->expect(Dtype::kFloat32, {p.B, p.capacity, p.Hk});
    }
    p.k_scale = k_scale.rows(), p.v_scale = v_scale.rows();
  } else if (k_scale || v_scale) {
    (k_scale ? k_scale : v_scale).fail("must be None for a cache of more than 8 bits");
  }
  const auto first_slot = next.value<std::optional<int64_t>>();
  if (k && first_slot) check_index("first_slot", *first_slot, 0, p.capacity - p.T);
  p.first_slot = first_slot.value_or(-1);
  return call;
}

Made write_kv(Arguments& next) {
  auto call = std::make_unique<WriteCall>();
  WriteCall& p = *call;
  const View k = next.tensor("k"), v = next.tensor("v");
  const View k_cache = next.tensor("k_cache"), v_cache = next.tensor("v_cache");
  const View slots = next.tensor("slots");
  const View k_scale = next.strided("k_scale"), v_scale = next.strided("v_scale");
  const View new_k_scale = next.strided("new_k_scale"), new_v_scale = next.strided("new_v_scale");
  for (const View* x : {&k, &k_cache}) {
    if (x->dims != 4) x->fail("must have 4 dimensions");
    if (x->dtype <= Dtype::kFloat16 || (x == &k_cache && of_8_bits(x->dtype))) continue;
    x->fail("must be float32, bfloat16 or float16, or a cache of 8 bits");
  }
  p.dtype = k.dtype, p.cache_dtype = k_cache.dtype;
  p.B = k.shape[0], p.T = k.shape[1], p.Hk = k.shape[2], p.D = k.shape[3];
  p.pages = k_cache.shape[0], p.page_size = k_cache.shape[1];
  k_cache.expect(p.cache_dtype, {p.pages, p.page_size, p.Hk, p.D});
  p.k = k.rows(), p.k_cache = k_cache.rows();
  if (v) {
    p.Dv = v_cache.shape[3];
    v.expect(p.dtype, {p.B, p.T, p.Hk, p.Dv});
    v_cache.expect(p.cache_dtype, {p.pages, p.page_size, p.Hk, p.Dv});
    p.v = v.rows(), p.v_cache = v_cache.rows();
    p.v_scale = scale_rows(new_k_scale ? new_v_scale : v_scale, v_cache);
  }
  p.dynamic = static_cast<bool>(new_k_scale);
  p.k_scale = scale_rows(p.dynamic ? new_k_scale : k_scale, k_cache);
  p.k_dense = p.Hk == 1 || (p.k.head == p.D && p.k_cache.head == p.D);
  p.v_dense = p.Hk == 1 || (p.v.head == p.Dv && p.v_cache.head == p.Dv);
  slots.expect(slots.dtype == Dtype::kInt32 ? Dtype::kInt32 : Dtype::kInt64, {p.B, p.T});
  if (slots.dtype == Dtype::kInt32) {
    p.slots32 = slots.as<int32_t>();
  } else {
    p.slots64 = slots.as<int64_t>();
  }
  p.slots_batch = slots.stride[0];
  return call;
}

// What lies in tiles has no gaps.
void expect_close(const View& x) {
  if (x.shape[1] > 1 && x.shape[0] > 1 && x.stride[0] != x.shape[1]) x.fail("must be contiguous");
}

// Rows of codes: int8 or e4m3 [rows, K], or of 4 bits in uint8, by blocks.
template <class Problem>
Codes take_rows(const Problem& p, const View& weight, bool first) {
  const Codes codes = weight.dtype == Dtype::kUInt8        ? Codes::k4Bits
                      : weight.dtype == Dtype::kFloat8E4M3 ? Codes::kFloat8
                                                           : Codes::k8Bits;
  const Dtype types[] = {Dtype::kInt8, Dtype::kUInt8, Dtype::kFloat8E4M3};
  weight.expect(types[kernel_of(first ? codes : p.codes)], {-1, code_bytes(codes, p.K)});
  return codes;
}

// Tiles of codes: int32 [rows, K / 4], or of 4 bits [rows, K / 8].
template <class Problem>
Codes take_tiles(const Problem& p, Linear::Weights& weights, const View& weight) {
  weight.expect(Dtype::kInt32, {-1, -1});
  const Codes codes = weight.shape[1] * 4 == p.K ? Codes::k8Bits : Codes::k4Bits;
  if (p.K % 8 || weight.shape[0] % kTileOutputs || weight.shape[1] * codes_in_word(codes) != p.K) {
    weight.fail("must be tiles of 16 rows and whole words: of K / 4, or of K / 8");
  }
  expect_close(weight);
  weights.stride = 4 * weight.shape[1];
  return codes;
}

// Codes of weights, in rows or tiles; a scale for each group of them, all of one size and type, and
// zero points that may be missing.
template <class Problem>
void take_codes(Problem& p, Linear::Weights& weights, const View& weight, const View& scale,
                const View& zero, bool first) {
  const bool tiles = weight.dtype == Dtype::kInt32;
  if (!first && tiles != p.tiles) weight.fail("must all be in tiles or none");
  const Codes codes = tiles ? take_tiles(p, weights, weight) : take_rows(p, weight, first);
  p.tiles = tiles;
  if (scale.dims != 2 || scale.dtype > Dtype::kFloat16) {
    scale.fail("must have 2 dimensions and be float32, bfloat16 or float16");
  }
  const int64_t groups = scale.shape[1];
  const bool floats = codes == Codes::kFloat8;
  const int64_t group = groups == 1 ? round_up(p.K, kBlockCodes)
                        : floats    ? kBlockCodes
                                    : p.K / groups;
  if (floats && groups > 1 && groups != ceil_div(p.K, kBlockCodes)) {
    scale.fail("must be of one group, or of 128 floats along K each");
  }
  if ((!floats && p.K % groups) || (group != 32 && group != 64 && group % kBlockCodes)) {
    scale.fail("must have groups of 32, 64 or a multiple of 128 along K, or one of all");
  }
  if (!first && (codes != p.codes || scale.dtype != p.scale_type || group != p.group)) {
    scale.fail("must be of one group and type for all weights");
  }
  p.codes = codes, p.scale_type = scale.dtype, p.group = group;
  weights.scale = scale.expect(p.scale_type, {weights.rows, groups}).data;
  weights.scale_row = scale.stride[0];
  if (tiles) expect_close(scale);
  if (!zero) return;
  if (floats) zero.fail("must be None beside floats of 8 bits");
  const Dtype type = codes == Codes::k4Bits ? Dtype::kUInt8 : Dtype::kInt8;
  weights.zero = zero.expect(type, {weights.rows, groups}).data;
  weights.zero_row = zero.stride[0];
  if (tiles) expect_close(zero);
}

// The rows of weights, and a bias that may be missing, of the type and depth of x; or of codes.
void take_weights(Linear& p, int part, const View& weight, const View& bias, const View& scale,
                  const View& zero) {
  Linear::Weights& weights = p.parts[part];
  weights = {weight.data, weight.shape[0], weight.stride[0], bias.data};
  if (bias) bias.expect_dense(p.dtype, weights.rows);
  if (scale) {
    if (part && p.codes == Codes::kNone) scale.fail("must be None beside weights without one");
    take_codes(p, weights, weight, scale, zero, part == 0);
  } else {
    if (part && p.codes != Codes::kNone) scale.fail("must be given as of the other weights");
    weight.expect(p.dtype, {-1, p.K});
  }
}

Activation activation_named(const std::optional<std::string>& name) {
  if (!name) return Activation::kNone;
  if (*name == "silu") return Activation::kSilu;
  if (*name == "gelu") return Activation::kGelu;
  if (*name == "gelu_tanh") return Activation::kGeluTanh;
  if (*name == "sigmoid") return Activation::kSigmoid;
  throw std::invalid_argument("activation must be silu, gelu, gelu_tanh or sigmoid, got " + *name);
}

// Sets the rows of a call that is not gated yet.
void set_rows(Linear& p, const View& x) {
  if (x.dtype > Dtype::kFloat16) x.fail("must be float32, bfloat16 or float16");
  x.expect(x.dtype, {-1, -1});
  p.dtype = x.dtype, p.M = x.shape[0], p.K = x.shape[1];
  p.x = x.data, p.x_row = x.stride[0];
}

void take_sum(Linear& p, const View& residual, const View& out) {
  p.out_float = out.dtype == Dtype::kFloat32;
  const Dtype type = p.out_float ? Dtype::kFloat32 : p.dtype;
  out.expect(type, {p.M, p.columns()});
  p.out = out.data, p.out_row = out.stride[0];
  if (!residual) return;
  residual.expect(type, {p.M, p.columns()});
  p.residual = residual.data, p.residual_row = residual.stride[0];
}

Made linear_few_rows(Arguments& next) {
  auto call = std::make_unique<PlainCall<Linear>>();
  Linear& p = *call;
  set_rows(p, next.tensor("x"));
  const View weight = next.tensor("weight"), bias = next.tensor("bias");
  const View up = next.tensor("up");
  p.activation = activation_named(next.value<std::optional<std::string>>());
  const View residual = next.tensor("residual");
  const View scale = next.tensor("scale"), zero = next.tensor("zero");
  const View up_scale = next.tensor("up_scale"), up_zero = next.tensor("up_zero");
  take_weights(p, 0, weight, bias, scale, zero);
  if (up) {
    p.gated = true, p.num_parts = 2;
    up.expect(weight.dtype, {p.parts[0].rows, weight.shape[1]});
    take_weights(p, 1, up, {"no bias", Value()}, up_scale, up_zero);
  }
  take_sum(p, residual, next.tensor("out"));
  return call;
}

// Codes, scale and zero of a weight; the last two are missing where it is no list of codes.
std::vector<Value> with_scales(const Value& weight) {
  if (weight.kind != Value::Kind::kList) return {weight, Value(), Value()};
  if (weight.size != 3) throw std::invalid_argument("weights must be codes, scale and zero");
  return std::vector<Value>(weight.items, weight.items + 3);
}

// Up to three layers of the same x, whose outputs stand behind one another; or with a gate, an
// activation, of the first times the second.
void take_parts(Linear& p, Arguments& next) {
  set_rows(p, next.tensor("x"));
  const auto weights = next.value<std::vector<Value>>();
  const auto biases = next.value<std::vector<Value>>();
  const auto gate = next.value<std::optional<std::string>>();
  if (weights.empty() || weights.size() > std::size(p.parts) || biases.size() != weights.size()) {
    throw std::invalid_argument("weights must be one to three tensors, with a bias or None each");
  }
  p.num_parts = static_cast<int>(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::vector<Value> coded = with_scales(weights[i]);
    take_weights(p, static_cast<int>(i), {"weights", coded[0]}, {"biases", biases[i]},
                 {"scale", coded[1]}, {"zero", coded[2]});
  }
  p.activation = activation_named(gate);
  p.gated = gate.has_value();
  if (p.gated && (p.num_parts != 2 || p.parts[0].rows != p.parts[1].rows)) {
    throw std::invalid_argument("weights must be two of one shape where there is a gate");
  }
  const View residual = next.tensor("residual");
  take_sum(p, residual, next.tensor("out"));
}

Made linear_parts(Arguments& next) {
  auto call = std::make_unique<PlainCall<Linear>>();
  take_parts(*call, next);
  return call;
}

Made linear_many_rows(Arguments& next) {
  auto call = std::make_unique<PlainCall<LinearManyRows>>();
  take_parts(*call, next);
  if (call->codes != Codes::kNone || !multiplies_many_rows(call->dtype)) {
    throw std::invalid_argument(
        "linear_many_rows: expected bfloat16 on the code path avx512_bf16, got another type or " +
        isa());
  }
  if (call->K % 2) throw std::invalid_argument("x must have an even number of columns");
  return call;
}

Made dequantise(Arguments& next) {
  auto call = std::make_unique<PlainCall<Dequantise>>();
  Dequantise& p = *call;
  const View codes = next.tensor("codes"), scale = next.tensor("scale");
  const View zero = next.tensor("zero"), out = next.tensor("out");
  p.dtype = floating_rows(out);
  p.K = out.expect(p.dtype, {codes.shape[0], -1}).shape[1];
  p.weights = {codes.data, codes.shape[0], codes.stride[0]};
  take_codes(p, p.weights, codes, scale, zero, true);
  p.out = out.data, p.out_row = out.stride[0];
  return call;
}

Made gate(Arguments& next) {
  auto call = std::make_unique<PlainCall<Gate>>();
  Gate& p = *call;
  const View first = next.tensor("first"), second = next.tensor("second");
  const Dtype read = floating_rows(first);
  p.M = first.shape[0], p.N = first.shape[1];
  second.expect(read, {p.M, p.N});
  p.activation = activation_named(next.value<std::optional<std::string>>());
  const View out = next.tensor("out");
  p.dtype = floating_rows(out), p.in_float = read == Dtype::kFloat32;
  out.expect(p.in_float ? p.dtype : read, {p.M, p.N});
  p.first = first.data, p.first_row = first.stride[0];
  p.second = second.data, p.second_row = second.stride[0];
  p.out = out.data, p.out_row = out.stride[0];
  return call;
}

// Writes best_tokens, best_scores, best_parents and best_masks: parts of one tree's arrays.
Made best_children(Arguments& next) {
  auto call = std::make_unique<PlainCall<BestChildren>>();
  BestChildren& p = *call;
  const View logits = next.tensor("logits"), scores = next.tensor("scores");
  const View masks = next.tensor("masks");
  p.first = next.value<int64_t>();
  const View tokens = next.tensor("best_tokens"), best = next.tensor("best_scores");
  const View parents = next.tensor("best_parents"), best_masks = next.tensor("best_masks");
  if (logits.dims != 3 || logits.dtype > Dtype::kFloat16) {
    logits.fail("must have 3 dimensions and be float32, bfloat16 or float16");
  }
  p.dtype = logits.dtype;
  p.B = logits.shape[0], p.nodes = logits.shape[1], p.vocabulary = logits.shape[2];
  p.width = tokens.expect(Dtype::kInt64, {p.B, -1}).shape[1];
  scores.expect(Dtype::kFloat32, {p.B, p.nodes});
  p.words = masks.expect(Dtype::kInt64, {p.B, p.nodes, -1}).shape[2];
  best.expect(Dtype::kFloat32, {p.B, p.width});
  parents.expect(Dtype::kInt64, {p.B, p.width});
  best_masks.expect(Dtype::kInt64, {p.B, p.width, p.words});
  if (p.width < 1 || p.width > p.nodes * p.vocabulary) {
    tokens.fail("must be at least one, and at most as many as there are");
  }
  check_index("first", p.first, 0, 64 * p.words - p.nodes - p.width);
  if (best.stride[0] != tokens.stride[0] || parents.stride[0] != tokens.stride[0] ||
      masks.stride[1] != p.words || best_masks.stride[1] != p.words) {
    tokens.fail("must be laid out as best_scores and best_parents, and masks densely");
  }
  p.logits = logits.data, p.logits_batch = logits.stride[0], p.logits_row = logits.stride[1];
  p.scores = scores.as<float>(), p.scores_batch = scores.stride[0];
  p.masks = masks.as<int64_t>(), p.masks_batch = masks.stride[0];
  p.best_tokens = tokens.as<int64_t>(), p.best_batch = tokens.stride[0];
  p.best_scores = best.as<float>(), p.best_parents = parents.as<int64_t>();
  p.best_masks = best_masks.as<int64_t>(), p.best_masks_batch = best_masks.stride[0];
  return call;
}

Made add_gumbel_noise(Arguments& next) {
  auto call = std::make_unique<PlainCall<GumbelNoise>>();
  GumbelNoise& p = *call;
  const View logits = next.tensor("logits");
  p.dtype = floating_rows(logits);
  p.n = logits.shape[0], p.vocabulary = logits.shape[1];
  p.logits = logits.data, p.logits_row = logits.stride[0];
  p.seed = static_cast<uint64_t>(next.value<int64_t>());
  const View requests = next.tensor("requests"), positions = next.tensor("positions");
  p.requests = requests.expect_dense(Dtype::kInt64, p.n).as<int64_t>();
  p.positions = positions.expect_dense(Dtype::kInt64, p.n).as<int64_t>();
  const View out = next.tensor("out");
  p.out = out.expect(Dtype::kFloat32, {p.n, p.vocabulary}).as<float>(), p.out_row = out.stride[0];
  return call;
}

}  // namespace

std::vector<Operator> specattn::layer_operators() {
  return {
      {"embed", &embed},
      {"rms_norm", &rms_norm},
      {"rotate_heads", &rotate_heads},
      {"write_kv", &write_kv},
      {"linear_few_rows", &linear_few_rows},
      {"linear_parts", &linear_parts,
       "linear_few_rows of up to three weights side by side: "
       "x, weights, biases, gate, residual, out. Of codes a weight is a tuple with scale and "
       "zero."},
      {"linear_many_rows", &linear_many_rows,
       "linear_parts of many rows of bfloat16, by AVX512-BF16: the same arguments, no codes."},
      {"dequantise", &dequantise, "The weights that codes mean: codes, scale, zero, out."},
      {"gate", &gate, "act(first) * second: first, second, activation, out."},
      {"best_children", &best_children},
      {"add_gumbel_noise", &add_gumbel_noise},
  };
}
