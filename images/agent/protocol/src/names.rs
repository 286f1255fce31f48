//! What a container's specification may name of the guest, which only the agent can find: the host
//! writes these names into a specification, and the agent puts paths in their place. Each is
//! written and parsed here alone.

use std::fmt;

/// Where the guest mounts the directory that the host shares with it. Volumes are below it.
pub const SHARED_DIR: &str = "/run/podvisor/shared";

/// The guest's POSIX shared memory, as the source of a bind mount: containers of a pod share it.
pub const SHARED_MEMORY: &str = "/dev/shm";

/// The option of a bind mount from [`SHARED_DIR`] into which the image's files are copied first.
pub const FILL: &str = "fill";

/// The path of a `pid` namespace that is not the container's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PidNamespace<'a> {
    /// That which all containers of the guest may share.
    Shared,
    /// That of the container with this id.
    OfContainer(&'a str),
}

const SHARED_PIDS: &str = "sandbox";
const CONTAINER_PIDS: &str = "container:";

impl<'a> PidNamespace<'a> {
    /// Parses the path of a namespace; `None` if it is a path in the file system, or empty.
    #[must_use]
    pub fn parse(path: &'a str) -> Option<Self> {
        match path {
            SHARED_PIDS => Some(Self::Shared),
            _ => path.strip_prefix(CONTAINER_PIDS).map(Self::OfContainer),
        }
    }
}

impl fmt::Display for PidNamespace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shared => f.write_str(SHARED_PIDS),
            Self::OfContainer(id) => write!(f, "{CONTAINER_PIDS}{id}"),
        }
    }
}

/// The source of a bind mount that is no path in the guest. Neither part is checked here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountSource<'a> {
    /// An image.
    Image {
        /// The serial number of its disk.
        serial: &'a str,
        /// A path in it; `None`: all of it.
        below: Option<&'a str>,
    },
    /// A volume in the guest's memory.
    Memory {
        /// Tells the volumes of a guest apart.
        key: &'a str,
        /// A path in it; `None`: all of it.
        below: Option<&'a str>,
    },
}

const IMAGE: &str = "image:";
const MEMORY: &str = "memory:";

impl<'a> MountSource<'a> {
    /// Parses the source of a mount; `None` if it is a path, or another kind of source.
    #[must_use]
    pub fn parse(source: &'a str) -> Option<Self> {
        let split = |named: &'a str| match named.split_once('/') {
            Some((name, below)) => (name, Some(below)),
            None => (named, None),
        };
        if let Some(named) = source.strip_prefix(IMAGE) {
            let (serial, below) = split(named);
            return Some(Self::Image { serial, below });
        }
        let (key, below) = split(source.strip_prefix(MEMORY)?);
        Some(Self::Memory { key, below })
    }
}

impl fmt::Display for MountSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let below = match self {
            Self::Image { serial, below } => {
                write!(f, "{IMAGE}{serial}")?;
                below
            }
            Self::Memory { key, below } => {
                write!(f, "{MEMORY}{key}")?;
                below
            }
        };
        match below {
            Some(below) => write!(f, "/{below}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_parsed() {
        for (namespace, path) in [
            (PidNamespace::Shared, "sandbox"),
            (PidNamespace::OfContainer("c1"), "container:c1"),
        ] {
            assert_eq!(namespace.to_string(), path);
            assert_eq!(PidNamespace::parse(path), Some(namespace));
        }
        let image = |below| MountSource::Image {
            serial: "0123",
            below,
        };
        let memory = |below| MountSource::Memory { key: "3", below };
        for (source, text) in [
            (image(None), "image:0123"),
            (image(Some("a/b")), "image:0123/a/b"),
            (image(Some("")), "image:0123/"),
            (memory(None), "memory:3"),
            (memory(Some("in it")), "memory:3/in it"),
        ] {
            assert_eq!(source.to_string(), text);
            assert_eq!(MountSource::parse(text), Some(source));
        }
    }

    #[test]
    fn paths_are_no_names() {
        for path in [
            "",
            "/proc/1/ns/pid",
            "Sandbox",
            "/run/podvisor/shared/image:1",
        ] {
            assert_eq!(PidNamespace::parse(path), None, "{path}");
            assert_eq!(MountSource::parse(path), None, "{path}");
        }
    }
}
