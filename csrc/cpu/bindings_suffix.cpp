// specattn._cpu.SuffixDrafter: drafting trees from a text's own repetitions.
#include "bindings.h"
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

}  // namespace

void specattn::define_suffix(py::module_& m) {
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
