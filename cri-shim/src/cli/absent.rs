//! Commands of docker and podman that podvisor does not have, and their replacements.

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
             runs, and `podvisor import` makes an image of a directory"
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
