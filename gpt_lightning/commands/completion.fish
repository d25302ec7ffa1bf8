# Completion of gpt-lightning for fish, printed by `gpt-lightning completion fish`.
# ~/.config/fish/completions/gpt-lightning.fish is read at the first <Tab>.
function __gpt_lightning_words
    echo '@TABLE@' | command awk '@PROGRAM@' $argv
end

function __gpt_lightning_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l current $words[-1]
    set -l option (string match -r -- '^--[^=]*=' "$current")
    for line in (__gpt_lightning_words $words[2..-1])
        if test "$line" != @file
            echo "$option$line"
            continue
        end
        for path in (__fish_complete_path (string replace -- "$option" '' "$current"))
            echo "$option$path"
        end
    end
end

complete -c gpt-lightning -f -a '(__gpt_lightning_complete)'
