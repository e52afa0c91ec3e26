/* SPDX-License-Identifier: BSD-3-Clause */
/* call.h: a call of a product with an epilogue of the user's: gemm's arguments, followed by the
 * epilogue. A library of such an epilogue defines
 *   GPUKERN_EPILOGUE          the name of the op and of its struct
 *   GPUKERN_EPILOGUE_HEADER   the header that defines the struct, as a string */
#ifndef GPUKERN_EPILOGUE_CALL_H
#define GPUKERN_EPILOGUE_CALL_H

#include "gpukern_epilogue.h"

#include GPUKERN_EPILOGUE_HEADER

#include "gpukern.h"

typedef GPUKERN_EPILOGUE Epilogue;

struct EpilogueCall : gk_gemm_args {
    Epilogue epilogue;
};

#endif
