#include "tuning.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#ifdef __linux__
#include <unistd.h>
#endif

namespace specattn {

Tuning tuning;

namespace {

struct Value {
  const char* name;
  int64_t Tuning::* at;
  int64_t least, most, step;
};

// Distances are of whole cache lines; what is multiplied in one go is of whole blocks of codes.
constexpr Value kValues[] = {
    {"wide", &Tuning::wide, 0, 1, 1},
    {"panels", &Tuning::panels, 0, 1, 1},
    {"lead_lines", &Tuning::lead_lines, 0, 8192, 1},
    {"heads_abreast", &Tuning::heads_abreast, 1, kMostAbreast, 1},
    {"stream_ahead", &Tuning::stream_ahead, 0, 1 << 17, 64},
    {"tile_ahead", &Tuning::tile_ahead, 0, 1 << 17, 64},
    {"key_ahead", &Tuning::key_ahead, 0, 1 << 17, 64},
    {"packed_bytes", &Tuning::packed_bytes, 4096, 1 << 18, 4096},
    {"panel_depth", &Tuning::panel_depth, 512, 1 << 15, 512},
    {"state_floats", &Tuning::state_floats, 1024, 1 << 16, 1024},
    {"linear_pieces", &Tuning::linear_pieces, 1, 64, 1},
    {"thread_work", &Tuning::thread_work, 1 << 10, 1 << 28, 1},
};

int64_t number_of(const std::string& text, const std::string& what) {
  const bool digits = !text.empty() && text.size() <= 12 &&
                      text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits) throw std::invalid_argument(what + ": expected a number, got \"" + text + "\"");
  return std::stoll(text);
}

struct Machine {
  std::string isa, vendor;
  std::array<int64_t, 3> sizes;  // family, KiB of an L1 and of an L2 cache

  explicit Machine(const std::string& text) {
    std::istringstream in(text);
    std::vector<std::string> words;
    for (std::string word; in >> word;) words.push_back(word);
    if (words.size() != 5) {
      throw std::invalid_argument(
          "machine: expected a code path, a vendor, a family and KiB of an L1 and an L2 cache, "
          "got \"" +
          text + "\"");
    }
    isa = words[0], vendor = words[1];
    for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = number_of(words[i + 2], "machine");
  }

  bool same_kind(const Machine& other) const { return isa == other.isa && vendor == other.vendor; }
  bool serves(const Machine& other) const {
    bool fits = same_kind(other);
    for (size_t i = 0; i < sizes.size(); ++i) fits = fits && sizes[i] <= other.sizes[i];
    return fits;
  }
};

struct Row {
  Machine machine;
  Tuning values;

  explicit Row(const std::string& line) : machine(line.substr(0, line.find(':'))) {
    set(values, line.substr(std::min(line.find(':'), line.size() - 1) + 1));
  }
};

}  // namespace

std::string values_of(const Tuning& from) {
  std::string text;
  for (const Value& value : kValues) {
    text +=
        (text.empty() ? "" : " ") + std::string(value.name) + "=" + std::to_string(from.*value.at);
  }
  return text;
}

void set(Tuning& to, const std::string& values) {
  std::istringstream in(values);
  Tuning changed = to;
  for (std::string word; in >> word;) {
    const size_t equals = std::min(word.find('='), word.size());
    const std::string name = word.substr(0, equals);
    const auto value = std::find_if(std::begin(kValues), std::end(kValues),
                                    [&](const Value& known) { return name == known.name; });
    if (value == std::end(kValues)) {
      throw std::invalid_argument("expected one of " + values_of(Tuning()) + ", got \"" + word +
                                  "\"");
    }
    const int64_t number = number_of(word.substr(std::min(equals + 1, word.size())), name);
    if (number < value->least || number > value->most || number % value->step != 0) {
      throw std::invalid_argument(name + ": expected " + std::to_string(value->least) + " to " +
                                  std::to_string(value->most) + " in steps of " +
                                  std::to_string(value->step) + ", got " + std::to_string(number));
    }
    changed.*value->at = number;
  }
  to = changed;
}

Tuning tuning_of(const std::string& machine, const std::string& table) {
  const Machine asked(machine);
  std::vector<Row> rows;
  std::istringstream in(table);
  for (std::string line; std::getline(in, line);) {
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    try {
      Row row(line);
      for (const Row& other : rows) {
        if (row.machine.same_kind(other.machine) && row.machine.sizes == other.machine.sizes) {
          throw std::invalid_argument("expected one row for a machine, got another before");
        }
      }
      rows.push_back(std::move(row));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("tuning, row \"" + line + "\": " + error.what());
    }
  }
  const Row* best = nullptr;
  for (const Row& row : rows) {
    if (!row.machine.serves(asked)) continue;
    if (!best || best->machine.sizes < row.machine.sizes) best = &row;
  }
  return best ? best->values : Tuning();
}

std::string machine_of(const std::string& isa) {
  static const std::string sizes = [] {  // asking a virtual processor takes long
    std::string vendor = "other";
    int64_t family = 0, caches[2] = {};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) vendor = "amd";
    if (__builtin_cpu_is("intel")) vendor = "intel";
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
#endif
#if defined(__linux__) && defined(_SC_LEVEL1_DCACHE_SIZE)
    caches[0] = std::max(sysconf(_SC_LEVEL1_DCACHE_SIZE), 0L) / 1024;
    caches[1] = std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 0L) / 1024;
#endif
    return vendor + " " + std::to_string(family) + " " + std::to_string(caches[0]) + " " +
           std::to_string(caches[1]);
  }();
  return isa + " " + sizes;
}

}  // namespace specattn
