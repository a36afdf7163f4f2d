#!/bin/bash
# Trains {{ name }} on this TPU VM, from boot until the run has ended. Written by pretrax launch tpu-vm.
set -u
mkdir -p {{ directory }} && cd {{ directory }} || exit
exec >> output.txt 2>&1
[ -e exit-code ] && exit  # the run has ended, and the VM has started again
metadata() {
    curl -sf -H 'Metadata-Flavor: Google' \
        "http://${GCE_METADATA_IP:-metadata.google.internal}/computeMetadata/v1/instance/attributes/$1"
}
slice=$(metadata tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: *'\(.*\)'/\1/p")
export PRETRAX_PROCESS=$(( ${slice:-0} * {{ hosts }} + $(metadata agent-worker-number) ))
echo $PRETRAX_PROCESS > process
{{ files }}
{ {{ setup }}; } || { echo {{ mistake }} > exit-code; exit; }
export PRETRAX_MEMORY=/dev/shm/pretrax.{{ name }}.$PRETRAX_PROCESS  # the newest states, until the run has ended
mkdir -p -m 700 $PRETRAX_MEMORY
failures=0
while [ ! -e stop ]; do
    {{ train }} &
    echo $! > pid
    wait $!
    code=$?
    case $code in {{ ends | join(' | ') }}) break ;; esac
    [ $code = {{ try_again }} ] || [ $code = {{ stopped }} ] || failures=$(( failures + 1 ))
    [ $failures -gt {{ restarts }} ] && break
    [ -e stop ] || sleep 10
done
rm -rf $PRETRAX_MEMORY
echo ${code:-{{ try_again }}} > exit-code
