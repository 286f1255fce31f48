//! dpkg's scripts for installing, removing and purging the package.

/// The scripts, by dpkg's names.
pub(super) const SCRIPTS: [(&str, &str); 3] = [
    ("postinst", include_str!("scripts/postinst")),
    ("prerm", include_str!("scripts/prerm")),
    ("postrm", include_str!("scripts/postrm")),
];

#[cfg(test)]
pub(super) mod tests {
    use std::process::{Command, Output, Stdio};

    use super::*;

    /// Prepares the system on which a test's script runs. `/etc`, `/run` and `/var/lib` are copies
    /// in memory; the package's scripts are available as commands by their names, and `systemctl`
    /// is a stand-in, which fails if `/mnt/fails` exists.
    const SYSTEM: &str = r#"
        set -eu
        mount -t tmpfs tmpfs /mnt
        mkdir /mnt/bin /mnt/run /mnt/lib
        cp -a /etc /mnt/etc
        mount --bind /mnt/etc /etc
        mount --bind /mnt/run /run
        mount --bind /mnt/lib /var/lib
        mkdir -p /run/systemd/system
        for name in postinst prerm postrm; do printenv "$name" > "/mnt/bin/$name"; done
        wants=/etc/systemd/system/multi-user.target.wants
        cat > /mnt/bin/systemctl <<END
#!/bin/sh
echo "\$*" >> /mnt/calls
case \$1 in
    enable) mkdir -p $wants && ln -sf /nowhere $wants/podvisor.service ;;
    disable) rm -f $wants/podvisor.service ;;
esac
[ ! -e /mnt/fails ]
END
        chmod +x /mnt/bin/*
        PATH=/mnt/bin:$PATH
        is_enabled() { test -L $wants/podvisor.service; }
        is_disabled() { test ! -L $wants/podvisor.service; }
        cd /
    "#;

    /// Runs a bash script as root on a copy of this system. It ends at the first command that
    /// fails.
    fn on_a_system(scripts: &[(&str, &str)], script: &str) -> Output {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "--pid", "--fork"])
            .args(["--mount-proc", "--kill-child", "bash", "-xc"])
            .arg(format!("{SYSTEM}{script}"))
            .envs(scripts.iter().copied())
            .stdin(Stdio::null());
        command.output().expect("unshare of util-linux")
    }

    /// Like [`on_a_system`], for a script that must succeed; returns its stderr.
    fn succeeds(script: &str) -> String {
        succeeds_with(&SCRIPTS, script)
    }

    /// Like [`succeeds`], with the scripts of any package.
    pub(crate) fn succeeds_with(scripts: &[(&str, &str)], script: &str) -> String {
        let output = on_a_system(scripts, script);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "run this test as root: {said}");
        said
    }

    #[test]
    fn a_purge_keeps_the_files_of_volumes_that_are_still_mounted() {
        succeeds(
            r#"
            mkdir -p /mnt/data/dir /run/podvisor/sb /run/podvisor-other/volume
            echo kept > /mnt/data/dir/file
            # As the daemon does when it starts.
            mount --bind /run/podvisor/sb /run/podvisor/sb
            below='/var/lib/podvisor/c/a b\c*/shared'
            mkdir -p /run/podvisor/sb/1/shared/v0 "$below/v0" "$below/"$'line\n'
            for point in /run/podvisor/sb/1/shared/v0 "$below/v0" "$below/v0" "$below/"$'line\n' \
                /run/podvisor-other/volume
            do
                mount --bind /mnt/data "$point"
            done
            touch /run/podvisor/netns /var/lib/podvisor/cri.redb
            mount --bind /mnt/data/dir/file /run/podvisor/netns
            mkdir /run/netns
            touch /run/netns/podvisor-1 /run/netns/podvisor-2 /run/netns/other
            mount --bind /proc/self/ns/net /run/netns/podvisor-1
            postrm purge
            test "$(ls /run/netns)" = other
            test "$(cat /mnt/data/dir/file)" = kept
            test ! -e /run/podvisor
            test ! -e /var/lib/podvisor
            mountpoint -q /run/podvisor-other/volume
            # There is nothing left for a second one.
            postrm purge
            "#,
        );
    }

    #[test]
    fn a_purge_removes_what_containers_have_of_the_network() {
        succeeds(
            r#"
            mkdir -p /run/netns /var/lib/podvisor/c/0123456789ab /var/lib/podvisor/c/short \
                /var/lib/cni/networks/podvisor /var/lib/cni/networks/other
            touch /run/netns/0123456789abcdef /run/netns/0123456789ff /run/netns/shorter
            touch /var/lib/cni/networks/podvisor/10.209.0.5
            mount --bind /proc/self/ns/net /run/netns/0123456789abcdef
            postrm remove
            test -e /run/netns/0123456789abcdef
            test -e /var/lib/cni/networks/podvisor/10.209.0.5
            postrm purge
            test "$(echo $(ls /run/netns))" = '0123456789ff shorter'
            test "$(ls /var/lib/cni/networks)" = other
            "#,
        );
    }

    #[test]
    fn a_purge_ends_before_it_removes_anything_when_something_stays_mounted() {
        let said = succeeds(
            r#"
            mkdir -p /mnt/data '/run/podvisor/sb/a b' /var/lib/podvisor
            echo kept > /mnt/data/file
            mount --bind /mnt/data '/run/podvisor/sb/a b'
            ln -s /bin/false /mnt/bin/umount
            code=0
            postrm purge || code=$?
            test $code = 1
            test "$(cat /mnt/data/file)" = kept
            test -e /var/lib/podvisor
            "#,
        );
        assert!(
            said.contains(r"below it: /run/podvisor/sb/a\040b"),
            "{said}"
        );
    }

    #[test]
    fn a_purge_empties_a_disk_of_its_own_and_follows_no_link() {
        let said = succeeds(
            r#"
            mkdir -p /var/lib/podvisor /mnt/elsewhere
            mount -t tmpfs tmpfs /var/lib/podvisor
            mkdir -p /var/lib/podvisor/images/.hidden
            touch /mnt/elsewhere/file
            ln -s /mnt/elsewhere /run/podvisor
            postrm purge
            mountpoint -q /var/lib/podvisor
            test -z "$(ls -A /var/lib/podvisor)"
            test ! -L /run/podvisor
            test -e /mnt/elsewhere/file
            "#,
        );
        assert!(said.contains("stays: /mnt/elsewhere"), "{said}");
    }

    #[test]
    fn what_starts_with_the_machine_does_so_until_it_is_disabled_or_purged() {
        succeeds(
            r#"
            again() { prerm remove; postrm remove; postinst configure 0.1.0; }
            postinst configure ''
            is_enabled
            again
            is_enabled
            systemctl disable podvisor.service
            prerm upgrade 0.2.0
            postrm upgrade 0.2.0
            postinst configure 0.1.0
            is_disabled
            again
            is_disabled
            systemctl enable podvisor.service
            prerm remove
            postrm remove
            postrm purge
            is_disabled
            postinst configure ''
            is_enabled
            "#,
        );
    }

    #[test]
    fn a_daemon_that_does_not_start_again_does_not_fail_the_upgrade() {
        let said = succeeds(
            r#"
            touch /mnt/fails
            postinst configure 0.1.0
            grep -x 'try-restart podvisor.service' /mnt/calls
            postinst configure ''
            prerm remove
            postrm remove
            "#,
        );
        assert!(
            said.contains("podvisor: the daemon does not start again"),
            "{said}"
        );
    }

    #[test]
    fn an_apparmor_that_restricts_user_namespaces_gets_the_profile() {
        succeeds(
            r#"
            mount -t tmpfs tmpfs /usr/share
            mkdir /usr/share/podvisor
            echo profile > /usr/share/podvisor/apparmor
            rm -rf /etc/apparmor.d
            mkdir -p /etc/apparmor.d/abi
            printf '#!/bin/sh\n' > /mnt/bin/aa-enabled
            printf '#!/bin/sh\necho "$*" >> /mnt/parsed\n' > /mnt/bin/apparmor_parser
            chmod +x /mnt/bin/*
            postinst configure ''
            test ! -e /etc/apparmor.d/podvisor
            touch /etc/apparmor.d/abi/4.0
            postinst configure 0.1.0
            grep -x profile /etc/apparmor.d/podvisor
            grep -e '--replace .*/etc/apparmor.d/podvisor$' /mnt/parsed
            postrm upgrade 0.2.0
            test -e /etc/apparmor.d/podvisor
            postrm remove
            grep -x -e '--remove /etc/apparmor.d/podvisor' /mnt/parsed
            test ! -e /etc/apparmor.d/podvisor
            postrm purge
            "#,
        );
    }

    #[test]
    fn who_removes_the_package_is_told_of_machines_that_still_run() {
        let said = succeeds(
            r#"
            prerm remove
            echo 'none yet' >&2
            cd /mnt
            # What a machine's process is called: the shell reads its script from a file.
            mkfifo sandbox
            (exec -a podvisor /bin/sh sandbox 0123abcd) &
            machine=$!
            # Waits until the shell has begun to read it.
            exec 3> sandbox
            prerm upgrade 0.2.0
            echo 'no warning yet' >&2
            prerm remove
            echo "its number is $machine." >&2
            "#,
        );
        let (before, after) = said.split_once("\nno warning yet\n").unwrap();
        assert!(!before.contains("WARNING"), "{said}");
        let number = after.split("its number is ").last().unwrap();
        let number = number.split('.').next().unwrap();
        assert!(after.contains("podvisor: WARNING"), "{said}");
        assert!(
            after.contains(&format!("in them: kill {number}\n")),
            "{said}"
        );
    }
}
