// specattn._cpu: every operator under its name, with the arguments of its torch operator and then
// the number of threads. Outputs are written in place.
#include <algorithm>
#include <cstdlib>

#include "../openmp.h"
#include "../operators.h"
#include "../linear.h"
#include "../run.h"
#include "../tuned.h"
#include "../tuning.h"
#include "graph.h"
#include "module.h"
#include "values.h"

namespace specattn {
namespace {

// Makes, checks and runs a call; a graph that records keeps it.
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    const auto* op = static_cast<const Operator*>(PyCapsule_GetPointer(self, nullptr));
    const Values values(given, count);
    Arguments next(values.data(), values.count());
    Made made = op->make(next);
    const int threads = next.value<int>();
    next.end();
    made->check();
    {
      const Unlocked unlocked;
      made->run(threads > 1 ? threads : 1);
    }
    if (PyGraph* const graph = PyGraph::recording()) graph->add(std::move(made), given, count);
    return Object::held(Py_None).release();
  });
}

void add_operators(PyObject* module) {
  static std::vector<PyMethodDef> definitions;  // they stay where they are
  definitions.reserve(operators().size());
  const Object name = Object::made(PyModule_GetNameObject(module));
  for (const Operator& op : operators()) {
    definitions.push_back({op.name,
                           reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                           METH_FASTCALL, op.doc});
    const Object held = Object::made(PyCapsule_New(const_cast<Operator*>(&op), nullptr, nullptr));
    Object made = Object::made(PyCFunction_NewEx(&definitions.back(), held.get(), name.get()));
    if (PyModule_AddObject(module, op.name, made.get())) throw PythonError();
    made.release();
  }
}

void read_bytes(uintptr_t memory, int64_t bytes, int threads) {
  const Unlocked unlocked;
  read(reinterpret_cast<const void*>(memory), bytes, threads);
}

void rewrite_bytes(uintptr_t memory, int64_t bytes, int threads) {
  const Unlocked unlocked;
  rewrite(reinterpret_cast<void*>(memory), bytes, threads);
}

void read_listed(uintptr_t memory, int64_t row_bytes, uintptr_t rows, int64_t count, int threads) {
  const Unlocked unlocked;
  read_rows(reinterpret_cast<const void*>(memory), row_bytes,
            reinterpret_cast<const int32_t*>(rows), count, threads);
}

int64_t multiply_named(const std::string& dtype, int64_t rounds, int threads) {
  constexpr int kComputed = static_cast<int>(Dtype::kFloat16) + 1;
  const auto at = std::find(kDtypeNames, kDtypeNames + kComputed, dtype);
  if (at == kDtypeNames + kComputed) {
    throw std::invalid_argument("dtype: expected float32, bfloat16 or float16, got " + dtype);
  }
  const Unlocked unlocked;
  return multiply_registers(static_cast<Dtype>(at - kDtypeNames), rounds, threads);
}

double bandwidth(std::optional<int64_t> bytes, std::optional<int> threads,
                 std::optional<int> repeats) {
  const Unlocked unlocked;
  return read_bandwidth(bytes.value_or(int64_t{1} << 28), threads.value_or(1), repeats.value_or(5));
}

bool by_panels() { return multiplies_many_rows(Dtype::kBFloat16) && tuning.panels != 0; }
std::string machine() { return machine_of(isa()); }
std::string values() {
  isa();  // chosen, and with it what it is tuned to
  return values_of(tuning);
}
std::string tuned_values(const std::string& machine, const std::optional<std::string>& table) {
  return values_of(tuning_of(machine, table.value_or(kTuned)));
}

std::shared_ptr<PyGraph> make_graph() { return std::make_shared<PyGraph>(); }
void enter(PyGraph& graph) { graph.begin(); }
void leave(PyGraph& graph, PyObject*, PyObject*, PyObject*) { graph.end(); }
void replay(const PyGraph& graph, int threads) { graph.replay(threads); }
size_t calls_of(const PyGraph& graph) { return graph.size(); }

void add_graph(PyObject* module) {
  static PyMethodDef methods[] = {
      function<&enter>("__enter__", nullptr),
      function<&leave>("__exit__", nullptr, "type", "value", "traceback"),
      function<&replay>("replay", nullptr, "threads"),
      {}};
  add_class<PyGraph, &make_graph>(
      module,
      {"specattn._cpu.Graph",
       "Kernel calls, recorded while they run, that run again in one go: `with graph: ...`, "
       "then `graph.replay(threads)`.",
       methods, nullptr, &length_of<PyGraph, &calls_of>});
}

PyMethodDef functions[] = {
    function<&isas>("isas", "Code paths that this processor has, best first."),
    function<&isa>("isa", "The code path in use."),
    function<&by_panels>("by_panels", "Whether `linear_many_rows` is faster than torch here."),
    function<&machine>("machine",
                       "This machine and the code path in use, as csrc/cpu/tuned.h has it."),
    function<&values>("tuning", "The values of the code path in use (csrc/cpu/tuning.h)."),
    function<&tune>("tune",
                    "Change values of the code path in use, \"stream_ahead=8192 ...\": no result "
                    "changes. Not while a call runs.",
                    "values"),
    function<&tuned_values>(
        "tuning_of", "The values that a table of rows, ours unless given, has for a machine.",
        "machine", "table"),
    function<&use_isa>("use_isa", "Force a code path, for tests and comparisons.", "name"),
    function<&read_bytes>(
        "read",
        "Read memory once and do nothing with it: the ceiling that kernels are held against.",
        "address", "bytes", "threads"),
    function<&rewrite_bytes>(
        "rewrite",
        "Read memory once and write it back as it was: the ceiling of what changes in place.",
        "address", "bytes", "threads"),
    function<&read_listed>(
        "read_rows", "Read rows of memory that a list of int32 names, and do nothing with them.",
        "address", "row_bytes", "rows", "count", "threads"),
    function<&multiply_named>(
        "multiply_registers",
        "Multiply numbers of a type (\"float32\", ...) that lie in registers, by the code path in "
        "use; returns the operations: the other ceiling that kernels are held against.",
        "dtype", "rounds", "threads"),
    function<&use_openmp>(
        "use_openmp",
        "Share calls among the threads of this process's OpenMP, or among those of our own (False);"
        " returns whether it is OpenMP's. Not while a call runs.",
        "on"),
    function<&bandwidth>("read_bandwidth",
                         "Bytes per second of the best of some streaming reads of fresh memory.",
                         "bytes", "threads", "repeats"),
    {}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "specattn._cpu",
                          "Attention primitives for the CPU, with the arguments of their torch "
                          "operators.",
                          -1,
                          functions,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace specattn

PyMODINIT_FUNC PyInit__cpu() {
  using namespace specattn;
  return guarded([] {
    tensor_type.load();
    if (const char* forced = std::getenv("SPECATTN_CPU_ISA")) use_isa(forced);
    Object module = Object::made(PyModule_Create(&definition));
    add_operators(module.get());
    add_graph(module.get());
    add_suffix(module.get());
    add_walk(module.get());
    return module.release();
  });
}
