package source

import (
	"fmt"
	"slices"
	"strings"

	"github.com/Masterminds/semver/v3"

	"github.com/towline/towline/internal/phase"
)

// isExact says whether version names one version of a chart, and not a range of them.
func isExact(version string) bool {
	_, err := semver.StrictNewVersion(strings.TrimPrefix(version, "v"))
	return err == nil
}

// spellings returns the ways to write an exact version: as given, then with the leading v added or taken away.
func spellings(version string) []string {
	if bare, prefixed := strings.CutPrefix(version, "v"); prefixed {
		return []string{version, bare}
	}
	return []string{version, "v" + version}
}

// choose returns the newest of versions that wanted allows: an exact version, or a range as Helm writes it. Pre-releases count only
// if wanted speaks of one. It fails with ErrNotFound if there is none and with phase.Invalid if wanted means nothing.
func choose(versions []string, wanted string) (string, error) {
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
		return "", phase.Invalid{Err: fmt.Errorf("parse chartVersion %q: %w", wanted, err)}
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
