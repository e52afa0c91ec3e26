/* gemm.h: the checks of a gemm call, for both files of its entry points. */
#ifndef GPUKERN_API_GEMM_H
#define GPUKERN_API_GEMM_H

#include "../checks.h"
#include "../dispatch.h"

gk_status gk_check_gemm(const gk_context *ctx, const gk_gemm_args *args);

#endif
