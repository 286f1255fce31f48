//! `podvisor template`: creates the template of a machine. It is not for users: podvisor starts
//! itself with it if a sandbox did not find a template.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use crate::sandbox::{self, Shape};

/// The nice value: it is less urgent than starting pods.
const NICENESS: i32 = 10;

/// Those that [`Shape::arguments`] returns.
#[derive(Debug, Args)]
pub(super) struct TemplateArgs {
    /// The machine, in JSON
    #[arg(value_name = "SHAPE", value_parser = parse_shape)]
    shape: Shape,
    /// Where templates are kept
    #[arg(value_name = "DIR")]
    templates: PathBuf,
}

fn parse_shape(text: &str) -> Result<Shape, serde_json::Error> {
    serde_json::from_str(text)
}

pub(super) fn run(args: &TemplateArgs) -> anyhow::Result<u8> {
    // If it fails, this runs with the priority of the parent.
    let _ = rustix::process::nice(NICENESS);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the event loop")?;
    let made = runtime.block_on(sandbox::make_template(&args.shape, &args.templates));
    runtime.shutdown_background();
    made?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt as _;
    use std::path::Path;

    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;
    use crate::cli::command::Command;
    use crate::machine::{NicKind, Transport};

    fn parsed(arguments: [OsString; 3]) -> (Shape, PathBuf) {
        let line = std::iter::once("podvisor".into()).chain(arguments);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Template(args) => (args.shape.clone(), args.templates.clone()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_process_that_makes_a_template_is_told_its_shape() {
        let shape = Shape {
            kernel: "/a kernel/\"vmlinux\"".into(),
            initramfs: "/initramfs ä".into(),
            vcpus: 2,
            max_vcpus: 64,
            memory: u64::MAX,
            growth: 3 << 30,
            image_slots: 4,
            nics: 5,
            nic_kind: NicKind::Stream,
            shares: true,
            transport: Transport::Pci,
            psi: true,
        };
        let other = Shape {
            nic_kind: NicKind::Tap,
            shares: false,
            transport: Transport::Mmio,
            psi: false,
            ..shape.clone()
        };
        // The directory may have any name.
        let templates = PathBuf::from(OsString::from_vec(b"/templ\xff".to_vec()));
        for shape in [shape, other] {
            let arguments = shape.arguments(&templates).unwrap();
            assert_eq!(parsed(arguments), (shape, templates.clone()));
        }
    }

    #[test]
    fn a_path_that_has_no_form_in_json_is_told() {
        let shape = Shape {
            kernel: OsString::from_vec(b"/k\xff".to_vec()).into(),
            initramfs: "/initramfs".into(),
            vcpus: 1,
            max_vcpus: 1,
            memory: 0,
            growth: 0,
            image_slots: 0,
            nics: 0,
            nic_kind: NicKind::Tap,
            shares: false,
            transport: Transport::Mmio,
            psi: false,
        };
        let error = shape.arguments(Path::new("/t")).unwrap_err();
        let causes = crate::machine::causes(&error);
        assert!(causes.contains("UTF-8"), "{causes}");
    }
}
