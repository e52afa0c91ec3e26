#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Runs a compiler and keeps all it says beside the object, as OBJECT.log: ptxas tells there, in a note and no more, of
# wgmma that it serialised, and tests/build/test_resources.py reads it. The lines of ptxas -v are not passed on.
previous=
for argument; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
"$@" >"$object.log" 2>&1
status=$?
sed -e '/^ptxas info *: \(Used\|Compiling entry\|Function properties\|Compile time\|[0-9]* bytes gmem\)/d' \
    -e '/^ *[0-9]* bytes stack frame/d' "$object.log" >&2
exit $status
