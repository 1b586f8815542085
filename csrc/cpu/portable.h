// What every unit of kernels shares, compiled for any processor: of a function that does not name
// its Isa the linker keeps one copy, whichever unit it came from. Included before a unit's target.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "address.h"
#include "convert.h"
#include "denormals.h"
#include "kernels.h"
#include "keys.h"
#include "prefetch.h"
#include "quantise.h"
#include "recurrent.h"
