package source

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/Masterminds/semver/v3"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// Repository is a place that charts come from, as one login sees it.
type Repository struct {
	URL   string
	Login Login
}

// RepositoryOf returns the repository of an expanded chart (see ExpandChart), and the chart's name in it.
func RepositoryOf(chart configv1beta1.HelmChart, login Login) (r Repository, name string) {
	return Repository{URL: chart.RepositoryURL, Login: login}, chartIn(chart)
}

// chartIn returns the name under which a chart's repository knows it.
func chartIn(chart configv1beta1.HelmChart) string {
	return strings.TrimPrefix(chart.ChartName, chart.RepositoryName+"/")
}

// Key tells repositories apart. It does not show the login.
func (r Repository) Key() string { return strings.TrimRight(r.URL, "/") + " " + r.Login.digest() }

// Newest returns, by name, the newest version that a repository has of each chart, pre-releases left out: "" if it has nothing else. An index
// is asked for once for all of them, the tags in a registry once for each. Charts that cannot be told are missing from the answer, and the
// error says why: ErrNotFound for one that the repository does not have, phase.Invalid for a URL or CA that only the user can cure.
func (c *Charts) Newest(ctx context.Context, r Repository, names []string) (map[string]string, error) {
	open, err := openerFor(r.URL)
	if err != nil {
		return nil, err
	}
	transport, err := newTransport(r.Login)
	if err != nil {
		return nil, err
	}
	defer transport.CloseIdleConnections()
	repository := open(c, r.URL, r.Login, transport)
	newest := map[string]string{}
	var failures []error
	for _, name := range names {
		versions, err := repository.versions(ctx, name)
		if err != nil {
			failures = append(failures, fmt.Errorf("chart %s in %s: %w", name, redacted(r.URL), err))
			if !errors.Is(err, ErrNotFound) {
				break // it would be no different with the next one
			}
			continue
		}
		newest[name] = newestStable(versions)
	}
	return newest, errors.Join(failures...)
}

// newestStable returns the newest of versions that is no pre-release; "" if there is none.
func newestStable(versions []string) string {
	var newest *semver.Version
	for _, version := range versions {
		parsed, err := semver.NewVersion(version)
		if err != nil || parsed.Prerelease() != "" {
			continue
		}
		if newest == nil || parsed.GreaterThan(newest) {
			newest = parsed
		}
	}
	if newest == nil {
		return ""
	}
	return newest.Original()
}

// Outdated says whether newest is a newer version than version. What is no version is neither.
func Outdated(version, newest string) bool {
	have, haveErr := semver.NewVersion(version)
	want, wantErr := semver.NewVersion(newest)
	return haveErr == nil && wantErr == nil && want.GreaterThan(have)
}

// versions returns what the index has of a chart.
func (r *httpRepository) versions(ctx context.Context, name string) ([]string, error) {
	listing, err := r.index(ctx, indexLife)
	if err != nil {
		return nil, err
	}
	var versions []string
	for _, entry := range listing.Entries[name] {
		if entry != nil {
			versions = append(versions, entry.Version)
		}
	}
	if len(versions) == 0 {
		return nil, ErrNotFound
	}
	return versions, nil
}

// versions returns the tags of a chart as versions.
func (r *ociRegistry) versions(ctx context.Context, name string) ([]string, error) {
	opened, err := r.open(name)
	if err != nil {
		return nil, err
	}
	return listVersions(ctx, opened)
}
