// specattn._cpu.SuffixDrafter: drafting trees from a text's own repetitions.
#include "bindings.h"
#include "check.h"
#include "ranked.h"
#include "suffix.h"

using namespace specattn;

namespace {

Successors take_successors(const py::object& table) {
  Successors successors;
  const View view = {"successors", table};
  if (!view) return successors;
  view.expect(Dtype::kInt32, {-1, -1});
  successors.tokens = view.as<int32_t>();
  successors.vocabulary = view.shape[0], successors.k = view.shape[1];
  successors.row = view.stride[0];
  return successors;
}

template <class Elem>
void rank(const View& logits, const View& tokens, const View& nodes, const View& table) {
  const int64_t k = table.shape[1];
  for (int64_t b = 0; b < logits.shape[0]; ++b) {
    for (int64_t step = -1, node = 0; step < nodes.shape[1] && node >= 0;) {
      const Elem* row = logits.as<Elem>() + b * logits.stride[0] + node * logits.stride[1];
      const int64_t token = tokens.as<int64_t>()[b * tokens.stride[0] + node];
      largest(row, logits.shape[2], k, table.as<int32_t>() + token * table.stride[0]);
      if (++step < nodes.shape[1]) node = nodes.as<int64_t>()[b * nodes.stride[0] + step];
    }
  }
}

// Writes the best successors of the root's token and of those on the path of accepted nodes.
void rank_successors(const py::object& given_logits, const py::object& given_tokens,
                     const py::object& given_nodes, const py::object& given_table) {
  const View logits = {"logits", given_logits}, tokens = {"tokens", given_tokens};
  const View nodes = {"nodes", given_nodes}, table = {"successors", given_table};
  if (logits.dims != 3 || logits.dtype > Dtype::kFloat16) {
    logits.fail("must have 3 dimensions and be float32, bfloat16 or float16");
  }
  const int64_t batch = logits.shape[0], size = logits.shape[1];
  tokens.expect(Dtype::kInt64, {batch, size});
  nodes.expect(Dtype::kInt64, {batch, -1});
  table.expect(Dtype::kInt32, {-1, -1});
  if (table.shape[1] > std::min(kMostRanked, logits.shape[2])) {
    table.fail("must keep at most 64 successors, and no more than there are tokens");
  }
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < size; ++i) {
      check_index("tokens", tokens.as<int64_t>()[b * tokens.stride[0] + i], 0, table.shape[0] - 1);
    }
    for (int64_t i = 0; i < nodes.shape[1]; ++i) {
      check_index("nodes", nodes.as<int64_t>()[b * nodes.stride[0] + i], -1, size - 1);
    }
  }
  const py::gil_scoped_release release;
  if (logits.dtype == Dtype::kFloat32) return rank<float>(logits, tokens, nodes, table);
  if (logits.dtype == Dtype::kBFloat16) return rank<bf16>(logits, tokens, nodes, table);
  rank<fp16>(logits, tokens, nodes, table);
}

}  // namespace

void specattn::define_suffix(py::module_& m) {
  m.def("rank_successors", &rank_successors, py::arg("logits"), py::arg("tokens"), py::arg("nodes"),
        py::arg("successors"),
        "Note what was ranked best behind the root and the accepted nodes, -1 behind their end.");
  py::class_<SuffixDrafter>(m, "SuffixDrafter", "Trees of what followed a text's end before.")
      .def(py::init<>())
      .def(
          "extend",
          [](SuffixDrafter& self, const std::vector<int32_t>& tokens, const py::object& table) {
            const Successors successors = take_successors(table);
            const py::gil_scoped_release release;
            for (const int32_t token : tokens) self.extend(token, successors);
          },
          py::arg("tokens"), py::arg("successors") = py::none(), "Append tokens to the text.")
      .def(
          "draft",
          [](const SuffixDrafter& self, int64_t nodes, int64_t depth, float least,
             const py::object& table) {
            const SuffixTree tree = self.draft(nodes, depth, least, take_successors(table));
            return py::make_tuple(tree.parents, tree.tokens, tree.probabilities);
          },
          py::arg("nodes"), py::arg("depth"), py::arg("least") = 0.0f,
          py::arg("successors") = py::none(),
          "Parents (-1: the text's end), tokens and path probabilities, the most probable first.")
      .def("__len__", [](const SuffixDrafter& self) { return self.automaton().size(); })
      .def_property_readonly(
          "match",
          [](const SuffixDrafter& self) {
            const auto& a = self.automaton();
            return a.state(a.match()).length;
          },
          "Tokens of the longest suffix that occurred before.")
      .def_property_readonly("bytes",
                             [](const SuffixDrafter& self) { return self.automaton().bytes(); });
}
