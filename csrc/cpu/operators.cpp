#include "operators.h"

#include <algorithm>

namespace specattn {

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> joined;
    for (const auto& part : {attention_operators(), layer_operators(), candidate_operators(),
                             recurrent_operators(), exchange_operators()}) {
      joined.insert(joined.end(), part.begin(), part.end());
    }
    return joined;
  }();
  return all;
}

const Operator& operator_named(const std::string& name) {
  return *std::find_if(operators().begin(), operators().end(),
                       [&](const Operator& one) { return name == one.name; });
}

}  // namespace specattn
