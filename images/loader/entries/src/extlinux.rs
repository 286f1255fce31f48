//! `extlinux.conf`, `syslinux.cfg`, `isolinux.cfg`: labels with a kernel, its initial file systems and
//! its command line. Menus' looks are ignored.

use thiserror::Error;

use crate::files::{Files, PathError, normalize};
use crate::volumes::{FileError, VolumeId};
use crate::{BootEntry, FileRef, Format, limits};

/// Where systems have it, from the root of a file system.
pub const PATHS: &[&str] = &[
    "boot/extlinux/extlinux.conf",
    "extlinux/extlinux.conf",
    "boot/extlinux.conf",
    "extlinux.conf",
    "boot/syslinux/syslinux.cfg",
    "syslinux/syslinux.cfg",
    "syslinux.cfg",
    "boot/isolinux/isolinux.cfg",
    "isolinux/isolinux.cfg",
    "isolinux.cfg",
];

/// A configuration that names nothing to boot.
#[derive(Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ExtlinuxError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A path is not followed.
    #[error("line {line} of {file}: {source}")]
    Path {
        /// The file.
        file: String,
        /// The line.
        line: usize,
        /// What is wrong with it.
        source: PathError,
    },
    /// Files that include each other.
    #[error("line {line} of {file}: it includes itself, or more than {max} files include each other", max = limits::INCLUDES)]
    Includes {
        /// The file.
        file: String,
        /// The line.
        line: usize,
    },
    /// Labels without end.
    #[error("line {line} of {file}: there are more than {max} labels or lines", max = limits::ENTRIES)]
    Labels {
        /// The file.
        file: String,
        /// The line.
        line: usize,
    },
    /// No label starts Linux.
    #[error("{file} has no label that starts a kernel")]
    NoKernel {
        /// The file.
        file: String,
    },
}

/// A label and what belongs to it.
#[derive(Clone, Debug, Default)]
struct Label {
    name: String,
    title: Option<String>,
    kernel: Option<(usize, String)>,
    initrds: Vec<(usize, String)>,
    append: Option<String>,
    is_default: bool,
}

#[derive(Debug, Default)]
struct Config {
    labels: Vec<Label>,
    default: Option<String>,
    on_timeout: Option<String>,
    append: Option<String>,
}

/// Returns what a configuration boots without a key pressed.
///
/// # Errors
///
/// If it cannot be read, includes itself, or has no label that starts a kernel.
pub fn load(files: &Files<'_>, volume: VolumeId, file: &str) -> Result<BootEntry, ExtlinuxError> {
    let mut config = Config::default();
    read(files, volume, file, &mut config, 0)?;
    let Config {
        labels,
        default,
        on_timeout,
        append,
    } = config;
    let starts = |label: &&Label| {
        let kernel = label.kernel.as_ref();
        kernel.is_some_and(|(_, path)| !is_other_program(path))
    };
    let named = |name: &Option<String>| {
        let name = name.as_deref()?;
        let is_it = |label: &&Label| label.name.eq_ignore_ascii_case(name);
        labels.iter().filter(starts).find(is_it)
    };
    // `default` may name a menu's program: then it is the label that the menu begins at.
    let label = named(&on_timeout)
        .or_else(|| named(&default))
        .or_else(|| labels.iter().filter(starts).find(|label| label.is_default))
        .or_else(|| labels.iter().find(starts));
    let no_kernel = || ExtlinuxError::NoKernel {
        file: file.to_owned(),
    };
    let label = label.ok_or_else(no_kernel)?;
    let (line, kernel) = label.kernel.as_ref().ok_or_else(no_kernel)?;
    let directory = file.rsplit_once('/').map_or("", |(directory, _)| directory);
    let resolve = |line: usize, path: &str| {
        let path = if path.starts_with('/') {
            path.to_owned()
        } else {
            format!("{directory}/{path}")
        };
        let path = normalize(&path).map_err(|source| ExtlinuxError::Path {
            file: file.to_owned(),
            line,
            source,
        })?;
        Ok::<_, ExtlinuxError>(FileRef::whole(volume, path))
    };
    let mut initrds = Vec::new();
    for (line, paths) in &label.initrds {
        for path in paths.split(',').filter(|path| !path.is_empty()) {
            initrds.push(resolve(*line, path)?);
        }
    }
    // A label's `append -` leaves out the common one.
    let append = label
        .append
        .clone()
        .or(append)
        .filter(|append| append != "-");
    let mut words = Vec::new();
    for word in append.unwrap_or_default().split_whitespace() {
        match word.strip_prefix("initrd=") {
            Some(paths) if initrds.is_empty() => {
                for path in paths.split(',').filter(|path| !path.is_empty()) {
                    initrds.push(resolve(*line, path)?);
                }
            }
            Some(_) => {}
            None => words.push(word.to_owned()),
        }
    }
    initrds.truncate(limits::INITRDS);
    Ok(BootEntry {
        title: label.title.clone().unwrap_or_else(|| label.name.clone()),
        format: Format::Extlinux,
        config: FileRef::whole(volume, file),
        kernel: resolve(*line, kernel)?,
        initrds,
        cmdline: words.join(" "),
    })
}

/// Whether a label's `kernel` is a program of SYSLINUX's, and no Linux.
fn is_other_program(path: &str) -> bool {
    let name = path.to_ascii_lowercase();
    [".c32", ".com", ".cbt", ".0", ".bin", ".bss", ".img"]
        .iter()
        .any(|end| name.ends_with(end))
}

fn read(
    files: &Files<'_>,
    volume: VolumeId,
    file: &str,
    config: &mut Config,
    depth: usize,
) -> Result<(), ExtlinuxError> {
    let Some(text) = files.read(volume, file)? else {
        return Ok(());
    };
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let (key, value) = (key.to_ascii_lowercase(), value.trim());
        let fault = || ExtlinuxError::Labels {
            file: file.to_owned(),
            line: number,
        };
        if key == "label" {
            if config.labels.len() >= limits::ENTRIES {
                return Err(fault());
            }
            config.labels.push(Label {
                name: value.to_owned(),
                ..Label::default()
            });
            continue;
        }
        if key == "default" {
            config.default = Some(value.to_owned());
        }
        if key == "ontimeout" {
            config.on_timeout = Some(value.to_owned());
        }
        if key == "include" || (key == "menu" && keyword(value) == "include") {
            let path = match key.as_str() {
                "menu" => value.split_whitespace().nth(1).unwrap_or_default(),
                _ => value.split_whitespace().next().unwrap_or_default(),
            };
            include(files, volume, (file, number), path, config, depth)?;
            continue;
        }
        let Some(label) = config.labels.last_mut() else {
            if key == "append" {
                config.append = Some(value.to_owned());
            }
            continue;
        };
        match key.as_str() {
            "kernel" | "linux" => label.kernel = Some((number, value.to_owned())),
            "initrd" => {
                if label.initrds.len() >= limits::INITRDS {
                    return Err(fault());
                }
                label.initrds.push((number, value.to_owned()));
            }
            "append" => label.append = Some(value.to_owned()),
            "menu" if keyword(value) == "default" => label.is_default = true,
            "menu" if keyword(value) == "label" => {
                let title = value.split_once(char::is_whitespace);
                let title = title.map_or("", |(_, title)| title.trim());
                label.title = Some(title.replace('^', ""));
            }
            _ => {}
        }
    }
    Ok(())
}

fn keyword(value: &str) -> String {
    let first = value.split_whitespace().next();
    first.unwrap_or_default().to_ascii_lowercase()
}

fn include(
    files: &Files<'_>,
    volume: VolumeId,
    (file, line): (&str, usize),
    path: &str,
    config: &mut Config,
    depth: usize,
) -> Result<(), ExtlinuxError> {
    let file_name = || file.to_owned();
    if depth >= limits::INCLUDES {
        let file = file_name();
        return Err(ExtlinuxError::Includes { file, line });
    }
    let directory = file.rsplit_once('/').map_or("", |(directory, _)| directory);
    let path = match path.strip_prefix('/') {
        Some(path) => path.to_owned(),
        None => format!("{directory}/{path}"),
    };
    let path = normalize(&path).map_err(|source| ExtlinuxError::Path {
        file: file_name(),
        line,
        source,
    })?;
    read(files, volume, &path, config, depth + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryVolumes;

    fn loaded(text: &str) -> Result<BootEntry, ExtlinuxError> {
        let volumes = MemoryVolumes::new().ext4("1", &[("boot/extlinux.conf", text.as_bytes())]);
        load(&Files::new(&volumes), VolumeId(0), "boot/extlinux.conf")
    }

    #[test]
    fn the_default_label_is_found_by_each_of_its_ways() {
        let labels = "LABEL one\n KERNEL /one\nLABEL two\n MENU DEFAULT\n LINUX two\n INITRD a,/b\n APPEND x\n";
        let kernel = |head: &str| loaded(&format!("{head}{labels}")).unwrap().kernel.path;
        assert_eq!(kernel("DEFAULT one\n"), "one");
        assert_eq!(kernel("DEFAULT menu.c32\n"), "boot/two");
        assert_eq!(kernel(""), "boot/two");
        assert_eq!(kernel("DEFAULT one\nONTIMEOUT Two\n"), "boot/two");
        let entry = loaded(labels).unwrap();
        let initrds: Vec<_> = entry
            .initrds
            .iter()
            .map(|file| file.path.as_str())
            .collect();
        assert_eq!(initrds, ["boot/a", "b"]);
    }

    #[test]
    fn an_initrd_may_stand_in_the_command_line() {
        let entry =
            loaded("label a\nkernel vmlinuz\nappend initrd=i.img,j.img root=/dev/x quiet\n");
        let entry = entry.unwrap();
        assert_eq!(entry.cmdline, "root=/dev/x quiet");
        assert_eq!(entry.initrds.len(), 2);
    }

    #[test]
    fn what_starts_no_kernel_is_an_error() {
        let message = |text: &str| loaded(text).unwrap_err().to_string();
        assert!(message("label a\nkernel menu.c32\n").contains("no label"));
        assert!(message("include extlinux.conf\n").contains("line 1"));
        assert!(message("label a\nkernel ../../x\n").contains("`..`"));
        assert!(message(&"label a\n".repeat(5000)).contains("labels"));
    }
}
