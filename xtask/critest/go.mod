module podvisor/critest

go 1.26.6

tool sigs.k8s.io/cri-tools/cmd/critest

require sigs.k8s.io/cri-tools v1.37.0
