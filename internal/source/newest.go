package source

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/Masterminds/semver/v3"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// Repository is a chart repository with the login that is used for it.
type Repository struct {
	URL   string
	Login Login
}

// RepositoryOf returns the repository of an expanded chart (see ExpandChart), and the chart's name in it.
func RepositoryOf(chart configv1beta1.HelmChart, login Login) (r Repository, name string) {
	return Repository{URL: chart.RepositoryURL, Login: login}, nameInRepository(chart)
}

// nameInRepository returns the name of a chart in its repository.
func nameInRepository(chart configv1beta1.HelmChart) string {
	return strings.TrimPrefix(chart.ChartName, chart.RepositoryName+"/")
}

// Key identifies the repository and the login, without secrets.
func (r Repository) Key() string { return strings.TrimRight(r.URL, "/") + " " + r.Login.digest() }

// Newest returns the newest versions of charts in a repository by name, without pre-releases. The version is "" if
// there are only pre-releases. Newest requests an index once for all charts, and the tags in a registry once per chart;
// both at most once a minute. A chart whose versions cannot be read is missing from the result, and has an error. It
// wraps ErrNotFound if the repository does not have the chart, and phase.TerminalError if the user must correct the URL
// or the CA.
func (c *Charts) Newest(ctx context.Context, r Repository, names []string) (map[string]string, error) {
	open, err := openerFor(r.URL)
	if err != nil {
		return nil, err
	}
	ctx, transport, disconnect, err := c.connect(ctx, r.Login)
	if err != nil {
		return nil, err
	}
	defer disconnect()
	repository := open(c, r.URL, r.Login, transport)
	newest := map[string]string{}
	var failures []error
	for _, name := range names {
		versions, err := repository.versions(ctx, name)
		if err != nil {
			failures = append(failures, fmt.Errorf("chart %s in %s: %w", name, redacted(r.URL), err))
			if _, isIndex := errors.AsType[*indexError](err); isIndex || isRepositoryError(err) {
				break // the next chart would fail too
			}
			continue
		}
		newest[name] = newestStable(versions)
	}
	return newest, errors.Join(failures...)
}

// newestStable returns the newest version that is not a pre-release, "" if there is none.
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

// IsOutdated returns whether newest is a newer version than version. It returns false if one of them is no version.
func IsOutdated(version, newest string) bool {
	have, haveErr := semver.NewVersion(version)
	want, wantErr := semver.NewVersion(newest)
	return haveErr == nil && wantErr == nil && want.GreaterThan(have)
}

// indexError is an error of the index, which all charts of a repository need. A registry has no indexError: each chart
// has its own tags, and its own access rules.
type indexError struct{ error }

// Unwrap returns the wrapped error.
func (e *indexError) Unwrap() error { return e.error }

// versions returns the versions of a chart in the index.
func (r *httpRepository) versions(ctx context.Context, name string) ([]string, error) {
	listing, err := r.index(ctx, indexTTL)
	if err != nil {
		return nil, &indexError{err}
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
