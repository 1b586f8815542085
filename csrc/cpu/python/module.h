// The parts of specattn._cpu.
#pragma once

#include "object.h"

namespace specattn {

void add_suffix(PyObject* module);
void add_walk(PyObject* module);

}  // namespace specattn
