// Verifies a drafted tree behind two paged prefixes, without Python, and
// compares with plain loops.
#include <specattn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kBatch = 2, kNodes = 3, kHeads = 4, kKvHeads = 2, kDim = 64;
constexpr int64_t kPages = 5, kPageSize = 8, kColumns = 3;
constexpr double kScale = 0.125;

// Numbers with a shape, and what DLPack says of them.
template <class T> class Tensor {
public:
  Tensor(std::vector<int64_t> sizes, DLDataType type)
      : shape_(std::move(sizes)) {
    int64_t count = 1;
    for (const int64_t size : shape_)
      count *= size;
    data_.resize(static_cast<size_t>(count));
    const auto dims = static_cast<int32_t>(shape_.size());
    view_ = {data_.data(), {kCpu, 0}, dims, type, shape_.data(), nullptr, 0};
  }

  T *data() { return data_.data(); }
  std::vector<T> &all() { return data_; }
  operator const DLTensor *() const { return &view_; }

private:
  static constexpr auto kCpu = static_cast<decltype(DLDevice::device_type)>(1);
  std::vector<int64_t> shape_;
  std::vector<T> data_;
  DLTensor view_;
};

Tensor<float> floats(std::vector<int64_t> shape) {
  return {std::move(shape), {2, 32, 1}};
}
Tensor<int32_t> integers(std::vector<int64_t> shape) {
  return {std::move(shape), {0, 32, 1}};
}

Tensor<float> random(std::vector<int64_t> shape) {
  static std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  Tensor<float> tensor = floats(std::move(shape));
  for (float &x : tensor.all())
    x = normal(generator);
  return tensor;
}

} // namespace

int main() {
  Tensor<float> q = random({kBatch, kNodes, kHeads, kDim});
  Tensor<float> k_cache = random({kPages, kPageSize, kKvHeads, kDim});
  Tensor<float> v_cache = random({kPages, kPageSize, kKvHeads, kDim});
  Tensor<float> k_tree = random({kBatch, kNodes, kKvHeads, kDim});
  Tensor<float> v_tree = random({kBatch, kNodes, kKvHeads, kDim});
  Tensor<float> out = floats({kBatch, kNodes, kHeads, kDim});
  Tensor<float> lse = floats({kBatch, kNodes, kHeads});
  Tensor<int32_t> lengths = integers({kBatch}),
                  pages = integers({kBatch, kColumns});
  lengths.all() = {19, 6};
  pages.all() = {4, 0, 2, 3, 0, 0};
  // A root with two children: every node sees itself and its ancestors.
  Tensor<int64_t> mask({1, kNodes, 1}, {0, 64, 1});
  mask.all() = {0b001, 0b011, 0b101};

  const auto verify = [&] {
    return specattn_hybrid_tree_attention(
        q, k_cache, v_cache, lengths, k_tree, v_tree, mask, /*depths=*/nullptr,
        pages,
        /*window=*/0, kScale, /*softcap=*/0, /*sinks=*/nullptr,
        /*cu_seqlens_q=*/nullptr,
        /*max_seqlen_q=*/0, /*k_scale=*/nullptr, /*v_scale=*/nullptr, out, lse,
        /*threads=*/2);
  };
  if (verify() != SPECATTN_OK) {
    std::printf("failed: %s\n", specattn_error());
    return EXIT_FAILURE;
  }

  double worst = 0;
  for (int64_t row = 0; row < kBatch * kNodes * kHeads; ++row) {
    const int64_t head = row % kHeads, node = row / kHeads % kNodes,
                  b = row / kHeads / kNodes;
    std::vector<const float *> keys, values;
    for (int64_t i = 0; i < lengths.data()[b]; ++i) {
      const int64_t page = pages.data()[b * kColumns + i / kPageSize];
      const int64_t at =
          ((page * kPageSize + i % kPageSize) * kKvHeads + head / 2) * kDim;
      keys.push_back(k_cache.data() + at),
          values.push_back(v_cache.data() + at);
    }
    for (int64_t i = 0; i < kNodes; ++i) {
      if (!(mask.data()[node] >> i & 1))
        continue;
      const int64_t at = ((b * kNodes + i) * kKvHeads + head / 2) * kDim;
      keys.push_back(k_tree.data() + at), values.push_back(v_tree.data() + at);
    }
    double sum = 0;
    std::vector<double> mean(kDim);
    for (size_t i = 0; i < keys.size(); ++i) {
      double logit = 0;
      for (int64_t d = 0; d < kDim; ++d)
        logit += q.data()[row * kDim + d] * keys[i][d];
      const double weight = std::exp(kScale * logit);
      sum += weight;
      for (int64_t d = 0; d < kDim; ++d)
        mean[d] += weight * values[i][d];
    }
    worst = std::fmax(worst, std::fabs(std::log(sum) - lse.data()[row]));
    for (int64_t d = 0; d < kDim; ++d) {
      worst = std::fmax(worst,
                        std::fabs(mean[d] / sum - out.data()[row * kDim + d]));
    }
  }
  std::printf("path %s: largest difference from plain loops %.1e\n",
              specattn_isa(), worst);

  // A page that does not exist is an error, not a crash.
  pages.data()[1] = kPages;
  const bool refused =
      verify() == SPECATTN_OUT_OF_RANGE &&
      std::string(specattn_error()).find("block_table") != std::string::npos;
  std::printf("a page that does not exist: %s\n", specattn_error());
  return worst < 1e-5 && refused ? EXIT_SUCCESS : EXIT_FAILURE;
}
