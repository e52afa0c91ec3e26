// SPDX-License-Identifier: BSD-3-Clause
// namespace.cpp: where torch finds the ops, torch.ops.<namespace>. The only object of ops/ that a
// plugin of another name has of its own.
#include "errors.h"

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)

namespace gk {
const char *const ops_namespace = STRINGIFY(GPUKERN_NAMESPACE);
} // namespace gk
