/* act.h: an activation in double (gemm.c). */
#ifndef GPUKERN_REF_ACT_H
#define GPUKERN_REF_ACT_H

#include "../gpukern.h"

double gk_ref_act(gk_activation activation, double x);

#endif
