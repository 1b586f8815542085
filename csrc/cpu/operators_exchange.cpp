// what the ranks of one machine exchange.
#include "operators.h"
#include "exchange.h"

using namespace specattn;

namespace {

struct ExchangeCall : Exchange, Call {
  void run(int) const override { Exchange::run(); }
};

Made all_gather(Arguments& next) {
  auto call = std::make_unique<ExchangeCall>();
  ExchangeCall& p = *call;
  const View memory = next.tensor("memory");
  p.file = next.value<int>(), p.rank = next.value<int>(), p.timeout = next.value<double>();
  const View own = next.tensor("own"), joined = next.tensor("all");
  memory.expect_dense(Dtype::kInt32, memory.shape[0]);
  own.expect_dense(Dtype::kInt32, own.shape[0]);
  joined.expect(Dtype::kInt32, {-1, own.shape[0]});
  if (joined.step(0) != 0 && joined.stride[0] != own.shape[0]) joined.fail("must be contiguous");
  constexpr int64_t kWord = sizeof(int32_t);
  p.memory = memory.as<char>(), p.memory_bytes = memory.shape[0] * kWord;
  p.own = own.as<char>(), p.bytes = own.shape[0] * kWord;
  p.all = joined.as<char>(), p.ranks = static_cast<int>(joined.shape[0]);
  if (p.rank < 0 || p.rank >= p.ranks) {
    throw std::invalid_argument("rank: expected one of " + std::to_string(p.ranks) + ", got " +
                                std::to_string(p.rank));
  }
  return call;
}

}  // namespace

std::vector<Operator> specattn::exchange_operators() {
  return {
      {"all_gather", &all_gather},
  };
}
