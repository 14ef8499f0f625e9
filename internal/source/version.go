package source

import (
	"fmt"
	"slices"
	"strings"

	"github.com/Masterminds/semver/v3"

	"github.com/towline/towline/internal/phase"
)

// IsExactVersion returns whether the chartVersion of a chart is one version and not a range, see Charts.
func IsExactVersion(version string) bool { return isExact(version) }

// isExact returns whether version is one version and not a range.
func isExact(version string) bool {
	_, err := semver.StrictNewVersion(strings.TrimPrefix(version, "v"))
	return err == nil
}

// spellings returns an exact version, unchanged and with the leading v added or removed.
func spellings(version string) []string {
	if bare, prefixed := strings.CutPrefix(version, "v"); prefixed {
		return []string{version, bare}
	}
	return []string{version, "v" + version}
}

// chooseVersion returns the newest version that wanted allows: an exact version or a range in Helm's syntax. A range
// allows pre-releases only if it has one. It fails with ErrNotFound if no version is allowed, and with
// phase.TerminalError if wanted is not valid.
func chooseVersion(versions []string, wanted string) (string, error) {
	if isExact(wanted) {
		for _, spelling := range spellings(wanted) {
			if slices.Contains(versions, spelling) {
				return spelling, nil
			}
		}
		return "", ErrNotFound
	}
	constraint, err := semver.NewConstraint(wanted)
	if err != nil {
		return "", phase.TerminalError{Err: fmt.Errorf("parse chartVersion %q: %w", wanted, err)}
	}
	var newest *semver.Version
	for _, version := range versions {
		parsed, err := semver.NewVersion(version)
		if err != nil || !constraint.Check(parsed) {
			continue
		}
		if newest == nil || parsed.GreaterThan(newest) {
			newest = parsed
		}
	}
	if newest == nil {
		return "", ErrNotFound
	}
	return newest.Original(), nil
}
