//! The package `podvisor-cluster`: KubeVirt's API, and the node's part of it as a service. The
//! service is of use in a cluster with that API alone, so that an administrator enables it.

use std::path::Path;

use anyhow::Result;

use super::tree::Tree;
use super::{Package, describe, licences};
use crate::paths;

/// What dpkg is told of it. The program is static.
pub(super) const PACKAGE: Package = Package {
    name: "podvisor-cluster",
    control: CONTROL,
    conffiles: "",
    scripts: &SCRIPTS,
};

const CONTROL: &str = "\
Package: podvisor-cluster
Version: @VERSION@
Architecture: @ARCHITECTURE@
Maintainer: The podvisor developers <developers@podvisor.invalid>
Installed-Size: @KIB@
Section: admin
Priority: optional
Recommends: podvisor
Description: KubeVirt's API over pods in virtual machines
 Webhooks, subresources and controllers of KubeVirt's API for a cluster whose
 nodes run podvisor, and the service podvisor-node, by which a node reports its
 virtual machines. The service is disabled until it is enabled.
";

const SCRIPTS: [(&str, &str); 3] = [
    ("postinst", include_str!("scripts/cluster-postinst")),
    ("prerm", include_str!("scripts/cluster-prerm")),
    ("postrm", include_str!("scripts/cluster-postrm")),
];

const COPYRIGHT: &str = "\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: podvisor

Files: *
Copyright: the podvisor developers
License: Apache-2.0
 /usr/share/common-licenses/Apache-2.0 is this licence's text. The program holds crates of others,
 whose licences are in /usr/share/doc/podvisor-cluster/third-party-licences.
";

/// Copies all files to their installed places.
pub(super) fn install(tree: &Tree, program: &Path) -> Result<()> {
    tree.copy(program, "usr/bin/podvisor-cluster", 0o755)?;
    tree.copy(
        &paths::root().join("deploy/podvisor-node.service"),
        "usr/lib/systemd/system/podvisor-node.service",
        0o644,
    )?;
    describe(tree, program, PACKAGE.name)?;
    let documents = "usr/share/doc/podvisor-cluster";
    tree.write(&format!("{documents}/copyright"), COPYRIGHT)?;
    let licences = licences::third_party(&[PACKAGE.name])?;
    tree.write(&format!("{documents}/third-party-licences"), &licences)
}

#[cfg(test)]
mod tests {
    use super::super::scripts::tests::succeeds_with;
    use super::super::tests::unit_of;
    use super::*;

    #[test]
    fn the_service_is_started_and_enabled_by_administrators_alone() {
        succeeds_with(
            &SCRIPTS,
            r#"
            postinst configure ''
            grep -x daemon-reload /mnt/calls
            postinst configure 0.1.0
            grep -x 'try-restart podvisor-node.service' /mnt/calls
            prerm upgrade 0.2.0
            prerm remove
            grep -x 'stop podvisor-node.service' /mnt/calls
            postrm remove
            test -z "$(grep -E '^(enable|start|restart)' /mnt/calls)"
            "#,
        );
    }

    #[test]
    fn a_purge_disables_the_service() {
        succeeds_with(
            &SCRIPTS,
            r#"
            mkdir -p $wants
            ln -sf /nowhere $wants/podvisor-node.service
            prerm remove
            postrm remove
            test -L $wants/podvisor-node.service
            postrm purge
            test ! -L $wants/podvisor-node.service
            "#,
        );
    }

    #[test]
    fn a_systemd_that_fails_does_not_fail_the_package() {
        let said = succeeds_with(
            &SCRIPTS,
            r#"
            touch /mnt/fails
            postinst configure 0.1.0
            prerm remove
            postrm remove
            "#,
        );
        assert!(said.contains("podvisor-cluster: the service"), "{said}");
    }

    #[test]
    fn the_unit_runs_the_program_that_is_installed() {
        let service = unit_of("deploy/podvisor-node.service", "Service");
        let runs = "ExecStart=/usr/bin/podvisor-cluster node";
        assert!(service.iter().any(|line| line == runs), "{service:?}");
        let install = unit_of("deploy/podvisor-node.service", "Install");
        let target = "WantedBy=multi-user.target";
        assert!(install.iter().any(|line| line == target), "{install:?}");
    }
}
