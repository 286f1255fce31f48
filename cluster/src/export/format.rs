//! The forms in which a volume is served, and where.

/// The forms of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Byte by byte.
    Raw,
    /// The same, packed by gzip.
    Gzip,
    /// The files of a volume that has no disk, as an archive that is packed.
    Archive,
}

impl Format {
    const ALL: [Self; 3] = [Self::Raw, Self::Gzip, Self::Archive];

    /// Those of a disk.
    pub(crate) const OF_DISK: [Self; 2] = [Self::Raw, Self::Gzip];

    /// Those of files.
    pub(crate) const OF_FILES: [Self; 1] = [Self::Archive];

    /// Its name in an export's links.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Gzip => "gzip",
            Self::Archive => "tar.gz",
        }
    }

    const fn file(self) -> &'static str {
        match self {
            Self::Raw => "disk.img",
            Self::Gzip => "disk.img.gz",
            Self::Archive => "disk.tar.gz",
        }
    }

    /// Where a volume is found in this form.
    pub(crate) fn path(self, volume: &str) -> String {
        format!("/volumes/{volume}/{}", self.file())
    }

    /// Which volume a path is of, and in which form.
    pub(super) fn of(path: &str) -> Option<(&str, Self)> {
        let (volume, file) = path.strip_prefix("/volumes/")?.split_once('/')?;
        let format = Self::ALL.into_iter().find(|format| format.file() == file)?;
        Some((volume, format))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_volume_and_a_form() {
        for format in Format::ALL {
            assert_eq!(Format::of(&format.path("a.b")), Some(("a.b", format)));
        }
        for path in [
            "",
            "/",
            "/volumes",
            "/volumes/a",
            "/volumes/a/",
            "/volumes/a/disk.img/",
        ] {
            assert_eq!(Format::of(path), None, "{path}");
        }
        assert_eq!(
            Format::of("/volumes/../disk.img"),
            Some(("..", Format::Raw))
        );
    }
}
