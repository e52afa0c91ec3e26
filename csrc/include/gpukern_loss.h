/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_loss.h: the old name of a part of gpukern_train.h, kept for one version. */
#include "gpukern_train.h"
