#include "isa_generic.h"
#include "kernels_of.h"

namespace specattn {

const Kernels& generic_kernels() {
  static constexpr Kernels kernels = kernels_of<Generic>("generic");
  return kernels;
}

}  // namespace specattn
