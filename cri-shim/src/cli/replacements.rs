//! Commands and flags of docker and podman that podvisor does not have, and their replacements.

/// Returns what to use instead of a command.
pub(super) fn instead_of(command: &str) -> Option<&'static str> {
    Some(match command {
        "start" | "restart" => {
            "a container that has ended is not started again: `podvisor rm` it and `podvisor run` \
             anew; `run --restart POLICY` starts a program again in its machine"
        }
        "create" => "`podvisor run -d` creates a container and starts it at once",
        "login" | "logout" => {
            "credentials are those that `docker login` or `podman login` keep; podvisor reads \
             their files"
        }
        "build" | "buildx" => {
            "build the image by docker, podman or buildah, and take it by `docker save IMAGE | \
             podvisor load`, or from a registry"
        }
        "commit" | "export" | "diff" => {
            "what a container has written ends with it: `podvisor cp` takes files out of one that \
             runs, `podvisor import` makes an image of a directory, and `podvisor vm commit` \
             one of a VM's disk"
        }
        "push" => "`podvisor save IMAGE -o FILE` writes an archive, which skopeo pushes",
        "rename" => "a container's name is given by `podvisor run --name`",
        "info" => "`podvisor version`, `podvisor check` and `podvisor system df` tell of it",
        "network" => {
            "networks are those of CNI, files in /etc/cni/net.d: `podvisor run --network NAME` \
             joins one"
        }
        "volume" => "share a directory of the host by `podvisor run -v HOST:GUEST`",
        "container" => "leave out `container`: `podvisor ps`, `podvisor rm` and so on",
        "update" => "a machine's CPUs and memory are given by `podvisor run --cpus --memory`",
        "search" => "look for images on the registry's pages",
        _ => return None,
    })
}

/// Returns why a flag of a command does not exist, and what to use instead.
pub(super) fn instead_of_flag(command: &str, flag: &str) -> Option<&'static str> {
    match (command, flag) {
        ("run" | "pod", flag) => instead_of_run_flag(flag),
        ("cp", "-L" | "--follow-link") => Some("a link is copied as a link: name what it leads to"),
        ("cp", "-a" | "--archive") => Some(
            "files belong to whom copies them; archives keep their owners: `podvisor cp \
             CONTAINER:PATH - | tar -x`, or `tar -c PATH | podvisor cp - CONTAINER:DIR`",
        ),
        ("ps", "-s" | "--size") => Some(
            "what a container has written is in its machine's memory, which --host-memory shows",
        ),
        _ => None,
    }
}

/// Returns why a flag of `run` (and of `pod create`) does not exist, and what to use instead.
fn instead_of_run_flag(flag: &str) -> Option<&'static str> {
    Some(match flag {
        "--volumes-from" => "name the directories themselves by -v HOST:GUEST",
        "--device" => {
            "a guest has its own kernel and none of the host's devices; a block device is shared \
             as a file by -v, by Kubernetes as a raw block volume"
        }
        "--security-opt" => {
            "the guest's seccomp filter is the default one; `--privileged` leaves it out, and the \
             machine's own jail confines in either case"
        }
        "--platform" => "images are those for linux/amd64, which the guest's CPU runs",
        "--pids-limit" => "its processes are in its own kernel: their memory is what --memory says",
        "-P" | "--publish-all" | "--expose" => "name each port by -p HOST:GUEST",
        "--memory-swap" | "--memory-swappiness" | "--memory-reservation" | "--oom-kill-disable" => {
            "a guest has no swap; its memory is what --memory says"
        }
        "--cpu-shares" | "-c" | "--cpu-quota" | "--cpu-period" | "--cpuset-cpus" => {
            "write --cpus N, or --cpus 1.5 to limit the program to that; all processes of a machine \
             can be limited in its control group on the host"
        }
        "--ip" | "--ip6" | "--mac-address" | "--network-alias" | "--link" => {
            "addresses and names are given by the network: `--network NAME` joins one of CNI's, \
             whose IPAM may name addresses"
        }
        "--log-driver" | "--log-opt" => {
            "the log is a file, which `podvisor logs` reads; --log-max-size bounds it"
        }
        "--userns" | "--uts" | "--cgroupns" | "--cgroup-parent" | "--ipc" => {
            "a container has a kernel of its own; containers of one pod share what a pod shares: \
             `podvisor pod create`, then `run --pod`"
        }
        "--annotation" => "write --label KEY=VALUE",
        "--gpus" | "--runtime" | "--isolation" | "--storage-opt" => {
            "there is one runtime, a virtual machine with virtio devices"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_docker_users_type_are_refused_by_name_with_a_reason() {
        for flag in [
            "--device",
            "--security-opt",
            "--platform",
            "--pids-limit",
            "-P",
            "--expose",
            "--memory-swap",
            "--cpu-shares",
            "--ip",
            "--mac-address",
            "--log-driver",
            "--log-opt",
            "--volumes-from",
            "--userns",
            "--ipc",
            "--annotation",
        ] {
            assert!(instead_of_flag("run", flag).is_some(), "{flag}");
        }
        for (command, flag) in [
            ("cp", "-L"),
            ("cp", "--follow-link"),
            ("cp", "-a"),
            ("cp", "--archive"),
            ("ps", "-s"),
            ("ps", "--size"),
        ] {
            assert!(instead_of_flag(command, flag).is_some(), "{command} {flag}");
        }
        for command in ["run", "cp", "ps", "stop"] {
            assert!(instead_of_flag(command, "--no-such-flag").is_none());
        }
        assert!(instead_of_flag("stop", "-a").is_none());
    }
}
